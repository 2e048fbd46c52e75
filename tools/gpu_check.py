"""Check and measure everything on one GPU: one command, under ten minutes, one JSON and a table.

    python tools/gpu_check.py                                    in about 500 seconds at most; writes gpu_check.json
    python tools/gpu_check.py --only gemm,layers --seconds 120   parts of it
    python tools/gpu_check.py --write-hardware configs/hardware/mine.yaml           and a profile for the planner from what was measured
    python tools/gpu_check.py --from gpu_check.json --write-hardware mine.yaml      the same from a file, without measuring
    python tools/gpu_check.py --device cpu --quick               the same code with tiny sizes on a CPU; says nothing about a GPU

Sections:
    correct    loss, logits and gradients of every backend and format against fp32
    recompute  does each level give the same bits
    memory     bytes per token and layer that each level keeps, against the memory model
    gemm       TFLOP/s of matrix products and of whole linears, bf16 and fp8
    attention  TFLOP/s by document length
    fit        seconds against tokens and document length, and the coefficients that fit them
    steps      whole steps of the planner: predicted and measured
    layers     TFLOP/s and MFU of layers of the 1b and 8b models, one document or many
Backends that are not installed are said to be, and the rest runs: torch 2.11 or newer and numpy are all that is needed. A section that fails,
hangs or loses the device is recorded, and the next one runs. Exit codes: 0 all ran, 1 something failed, 2 the request can't be met.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(TOOLS), str(TOOLS.parent)) if path not in sys.path]

from gpu_check_table import report_lines, section_line, targets_of  # noqa: E402

from megadcp.config.check import UserError, nearest  # noqa: E402

CHILD = TOOLS / "gpu_check_child.py"
NAMES = ("correct", "recompute", "memory", "gemm", "attention", "fit", "steps", "layers")
SECONDS = 500.0
GRACE = 90.0  # which one measurement may take beyond its section's share, compilation among it
START = 120.0  # for torch and the device to come up
VERSION = 1
Report = dict[str, Any]


class Lost(Exception):
    """The measuring process ended, or had to be ended, within a section."""


# ----------------------------------------------------------------------------------------------------------------------- request
def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Take a command line apart; UserError for what can't be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="gpu_check.json", help="where the JSON goes (gpu_check.json)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu is for trying the tool")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all sections together ({SECONDS:g}); what there is no time for is named")
    parser.add_argument("--only", default="", help="sections, with commas between")
    parser.add_argument("--from", dest="source", default="", help="a JSON that was written before: show it, measure nothing")
    parser.add_argument("--write-hardware", default="", metavar="FILE.yaml", help="write a hardware profile from the fit section")
    parser.add_argument("--overwrite", action="store_true", help="--write-hardware may replace any file")
    asked = parser.parse_args(argv)
    asked.sections = [name for name in asked.only.split(",") if name] or list(NAMES)
    for name in asked.sections:
        if name not in NAMES:
            raise UserError(f"--only={name} is no section; {nearest(name, NAMES)}")
    asked.sections.sort(key=NAMES.index)
    if not asked.seconds > 0:
        raise UserError(f"--seconds={asked.seconds:g} leaves no time; legal here: above 0")
    if asked.device == "cpu" and not asked.quick and not asked.source:
        raise UserError("--device cpu would take hours with the sizes of a GPU; add --quick")
    folder = Path(asked.out).resolve().parent
    if not asked.source and (not folder.is_dir() or not os.access(folder, os.W_OK)):
        raise UserError(f"--out={asked.out}: the folder {folder} does not exist or can't be written to")
    return asked


# --------------------------------------------------------------------------------------------------------------------- measuring
def measure(asked: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Run the sections, each in the process of the one before unless that was lost.

    Raises:
        UserError: there is no such device.
    """
    begin = time.time()
    report: Report = {"version": VERSION, "tool": "gpu_check", "quick": asked.quick, "device": {}, "sections": {}}
    until, left = begin + asked.seconds, list(asked.sections)
    while left:
        before = len(left)
        _one_process(asked, report, left, until, say)
        if len(left) == before:  # it didn't even begin one
            name = left.pop(0)
            report["sections"].setdefault(
                name, {"status": "failed", "seconds": 0.0, "rows": [], "left_out": [], "error": "the process ended before it"}
            )
            say(section_line(name, report["sections"][name]))
        if left and time.time() > until:
            for name in left:
                report["sections"][name] = {"status": "left out", "seconds": 0.0, "rows": [], "left_out": ["all of it"], "error": "no time was left"}
                say(section_line(name, report["sections"][name]))
            break
    report["seconds"] = time.time() - begin
    report["targets"] = targets_of(report)
    return report


def _one_process(asked: argparse.Namespace, report: Report, left: list[str], until: float, say: Callable[[str], None]) -> None:
    """Start a measuring process for the sections `left`, and take from it what it finishes; one that it dies in counts as finished."""
    request = {"device": asked.device, "quick": asked.quick, "sections": list(left), "until": until, "results": report["sections"]}
    running, limit = "", [time.time() + START]
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, str(CHILD), str(writing)],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            pass_fds=[writing],
            start_new_session=True,
        )
        os.close(writing)
        try:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
            except BrokenPipeError:
                pass  # it has ended already; the loop below says so
            for event in _events(reading, limit):
                if "refused" in event:
                    raise UserError(event["refused"])
                if "device" in event:
                    report["device"] = event["device"]
                elif "begin" in event:
                    running, limit[0] = event["begin"], time.time() + event["seconds"] + GRACE
                else:
                    name = event.pop("section")
                    report["sections"][name] = event
                    left.remove(name)
                    running, limit[0] = "", time.time() + START
                    say(section_line(name, event))
            process.wait(10)
            if running:
                code = process.returncode
                raise Lost(f"the process ended with {'signal ' + signal.Signals(-code).name if code < 0 else f'exit code {code}'}")
        except (Lost, TimeoutError, subprocess.TimeoutExpired) as error:
            name = running or left[0] if left else ""
            if name:
                errors.seek(0)
                tail = errors.read().decode("utf-8", "replace")[-2000:]
                report["sections"][name] = {"status": "failed", "seconds": 0.0, "rows": [], "left_out": [], "error": str(error), "output": tail}
                left.remove(name)
                say(section_line(name, report["sections"][name]))
        finally:
            os.close(reading)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _events(descriptor: int, limit: list[float]) -> Iterator[dict[str, Any]]:
    """JSON lines as they come. TimeoutError when none comes before the time in `limit`, which whoever takes an event may move."""
    rest = b""
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, limit[0] - time.time()))
        if not ready:
            raise TimeoutError("no result within its time; the process was ended")
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield json.loads(line)


# --------------------------------------------------------------------------------------------------------------------------- main
def write_json(path: Path, report: Report) -> None:
    """Under another name first, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_report(name: str) -> Report:
    """A JSON that this tool wrote."""
    try:
        report: Report = json.loads(Path(name).read_text(encoding="utf-8"))
        known = report["tool"] == "gpu_check" and report["version"] == VERSION
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--from={name} can't be read as a report of gpu_check: {error}") from None
    if not known:
        raise UserError(f"--from={name} is of version {report['version']}; legal here: {VERSION}")
    return report


def check(argv: Sequence[str] | None = None) -> int:
    """One call."""
    asked = parse(argv)
    profile = None
    if asked.write_hardware:
        from gpu_check_profile import check_profile_file

        profile = check_profile_file(asked.write_hardware, asked.overwrite)
    if asked.source:
        report = read_report(asked.source)
    else:
        report = measure(asked, lambda line: print(line, flush=True))
        write_json(Path(asked.out), report)
    if profile:
        from gpu_check_profile import write_hardware

        write_hardware(profile, report)
    print("\n".join(report_lines(report)))
    if not asked.source:
        print(f"wrote {asked.out} ({report['seconds']:.0f} s)")
    if profile:
        print(f"wrote {profile}; hardware={profile.stem} takes it from configs/hardware")
    return 1 if any(each["status"] == "failed" for each in report["sections"].values()) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of one call."""
    try:
        return check(argv)
    except UserError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the table has left; the files are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
