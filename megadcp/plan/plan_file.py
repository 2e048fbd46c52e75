"""plans.jsonl: one plan a line, in step order. What never changes (model, profile, stage_layers) stands once, in header lines.

A header line is {"sha256": HASH, "value": VALUE}; a plan line has {"ref": HASH} in place of the value. HASH is sha256 of the value's
canonical JSON (step_plan.sha256_of). A plan's own hash is that of the plan with its values in place.

plans.jsonl.zst holds the same lines, each plan with the headers it is the first to need in a zstd frame of its own, with a checksum. So
`zstd -dc` reads it, a killed run loses at most the frame that was being written, and the file can be cut before any step.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from megadcp.config.check import UserError
from megadcp.plan.step_plan import PlanFormatError, StepPlan, from_json, sha256_of, to_json

SHARED = ("model", "profile", "stage_layers")
NAME, PACKED_NAME = "plans.jsonl", "plans.jsonl.zst"
PLAIN_DOES = f", or set plan.compress=false for {NAME}"
MAGIC = b"\x28\xb5\x2f\xfd"  # first bytes of a zstd frame
ZSTD_LEVEL = 3
CHUNK, SMALL_FRAME = 1 << 20, 1 << 15
STEP = re.compile(rb'\{"version":[0-9]+,"step":([0-9]+),')  # how the writer begins a plan's line: its step without reading the rest
Report = Callable[[str], None]


def _nobody(line: str) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Record:
    """A plan as it stands in the file: its line, and the header lines that must stand somewhere above it, by their sha256."""

    step: int
    hash: str
    line: bytes
    headers: tuple[tuple[str, bytes], ...]


def record_of(plan: StepPlan) -> Record:
    """The lines of one plan. Costs milliseconds for thousands of documents: whoever plans ahead does it ahead, too."""
    document = to_json(plan)
    headers = []
    for name in SHARED:
        digest = sha256_of(document[name])
        headers.append((digest, _text({"sha256": digest, "value": document[name]})))
        document[name] = {"ref": digest}
    return Record(plan.step, document["hash"], _text(document), tuple(headers))


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n"


# ------------------------------------------------------------------------------------------------------------ where it is
def plans_file(folder: Path, compress: bool = False, first_step: int = 0, report: Report = _nobody) -> Path:
    """The file that a run in this folder writes its plans to.

    A run that goes on keeps to the kind of file it has begun, whatever plan.compress says now: one record, each step once. One that begins
    anew (first_step 0) replaces the other kind. UserError if zstandard is needed and not installed.
    """
    wanted, other = (folder / name for name in ((PACKED_NAME, NAME) if compress else (NAME, PACKED_NAME)))
    if _filled(other):
        if first_step == 0:
            other.unlink()
            report(f"{other}: removed; this run begins at step 0 and writes its plans to {wanted.name}")
        elif not _filled(wanted):
            report(f"plan.compress={str(compress).lower()} holds for new runs: this one goes on with {other}")
            wanted = other
        else:
            report(f"WARNING: {folder} has both {NAME} and {PACKED_NAME}; plans go to {wanted.name}, the other is left as it is")
    if wanted.name == PACKED_NAME:
        need_zstandard("" if _filled(wanted) else PLAIN_DOES)
    return wanted


def find_plans(path: Path | str) -> Path:
    """The file of plans that a path names: itself, or the one in a run folder. UserError if there is none."""
    path = Path(path)
    if path.is_file():
        return path
    found = [path / name for name in (NAME, PACKED_NAME) if (path / name).is_file()]
    filled = [one for one in found if _filled(one)] or found
    if not filled:
        raise UserError(f"{path} holds no plans; give a run folder with {NAME} or {PACKED_NAME}, or such a file")
    return filled[0]


def _filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def need_zstandard(otherwise: str = "") -> Any:
    """The module zstandard, or a UserError that says how to get it and what else would do."""
    try:
        import zstandard as module
    except ImportError:
        raise UserError(f"{PACKED_NAME} needs zstandard: pip install zstandard{otherwise}") from None
    return module


# ---------------------------------------------------------------------------------------------------------------- writing
class PlanWriter:
    """Appends plans to a file, packed if its name ends in .zst. Opening cuts off what was interrupted and everything from `first_step` on.

    So a run that resumes at step k, and plans step k again, leaves each step in the file once. `report` gets a line on what was cut. Only
    the end of the file is looked at, back to step k: resuming costs the same whatever the run's length. PlanFormatError for damage there.
    """

    def __init__(self, path: Path | str, first_step: int = 0, report: Report = _nobody) -> None:
        self.path = Path(path)
        self._compress = None
        if self.path.suffix == ".zst":
            self._compress = need_zstandard().ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compress
        end = _find_end(self.path, first_step)
        if end.torn:
            report(f"{self.path}: {end.torn}; writing goes on after the last complete {'line' if self._compress is None else 'frame'}")
        if end.cut_steps:
            report(f"{self.path}: {end.cut_steps} plans from step {first_step} on will be written again")
        self._known, self._last = end.known, end.last
        self._file = open(self.path, "ab")  # noqa: SIM115 - lives as long as the run; close() or the context manager ends it
        self._file.truncate(end.keep)

    def append(self, plan: StepPlan, record: Record | None = None) -> None:
        """Write one plan, flushed. ValueError unless its step comes after the last one in the file. `record`: record_of(plan), if made already."""
        if plan.step <= self._last:
            raise ValueError(f"{self.path}: step {plan.step} after step {self._last}: every step is written once, in order")
        record = record or record_of(plan)
        new = [line for digest, line in record.headers if digest not in self._known]
        data = b"".join([*new, record.line])
        try:
            self._file.write(data if self._compress is None else self._compress(data))
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self._known.update(digest for digest, _ in record.headers)
        self._last = plan.step

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards. What a plan that failed has left behind is no new error."""
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> PlanWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass
class _End:
    """Where writing goes on: bytes that are kept, last step and headers known there, plans after it, what is wrong with the end."""

    keep: int = 0
    last: int = -1
    known: set[str] = field(default_factory=set)
    cut_steps: int = 0
    torn: str = ""


def _find_end(path: Path, first_step: int) -> _End:
    """Walk a file backwards to the last plan before `first_step`."""
    end = _End()
    if not _filled(path):
        return end
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        packed = path.suffix == ".zst"
        if data[:4] == MAGIC if not packed else data[:1] == b"{":
            raise PlanFormatError(f"{path}: its name says {'zstd' if packed else 'text'}, its content doesn't; rename or remove it")
        parts = _frames_backwards(data, path) if packed else _lines_backwards(data, path)
        end.keep = len(data)
        for start, stop, line in parts:
            if line is None:
                end.torn, end.keep = _torn(data, path, start, stop, packed), start
                continue
            step = _step_of(line)
            if step is None:
                if start < end.keep:  # not in the frame of a plan that is cut
                    end.known.add(str(json.loads(line)["sha256"]))
            elif step >= first_step:
                end.cut_steps += 1
                end.keep, end.known = start, set()
            else:
                end.last = step
                document = _value(line)
                if document is None:  # only in a text file: a frame was looked at as a whole
                    raise PlanFormatError(f"{path}:{_number(data, start)}: not a complete JSON object ({len(line)} bytes, interrupted or damaged)")
                end.known |= _references(document)
                break
    return end


def _references(document: dict[str, Any]) -> set[str]:
    """The headers that stand above a plan's line, because it refers to them."""
    return {document[name]["ref"] for name in SHARED if isinstance(document.get(name), dict) and "ref" in document[name]}


def _torn(data: mmap.mmap, path: Path, start: int, stop: int, packed: bool) -> str:
    if packed:
        return f"the last {stop - start} bytes are not a complete frame (interrupted or damaged)"
    return f"line {_number(data, start)} is not a complete JSON object ({stop - start} bytes, interrupted or damaged)"


def _number(data: mmap.mmap, start: int) -> int:
    """Number of the line that begins at `start`; counted only when something is wrong with it."""
    return 1 + sum(data[at : min(at + CHUNK, start)].count(b"\n") for at in range(0, start, CHUNK))


Part = tuple[int, int, bytes | None]  # from byte, to byte, line; None: a torn end


def _lines_backwards(data: mmap.mmap, path: Path) -> Iterator[Part]:
    """The lines of a text file from the last one on. Damage is forgiven in the last line only."""
    stop = len(data)
    while stop:
        start = data.rfind(b"\n", 0, stop - 1) + 1
        line = data[start:stop]
        if _complete(line, thorough=stop == len(data)):
            yield start, stop, line
        elif stop == len(data):
            yield start, stop, None
        else:
            raise PlanFormatError(f"{path}:{_number(data, start)}: not a complete JSON object ({stop - start} bytes, interrupted or damaged)")
        stop = start


def _complete(line: bytes, thorough: bool) -> bool:
    """Whether a line is a JSON object and ends. Without `thorough` the look of a plan's line at both its ends will do."""
    if not thorough and STEP.match(line) and line.endswith(b"}\n"):
        return True
    return _value(line) is not None


def _step_of(line: bytes) -> int | None:
    """The step of a plan's line; None of a header."""
    if found := STEP.match(line):
        return int(found[1])
    value = json.loads(line)
    return None if "sha256" in value else int(value.get("step", -1))


def _frames_backwards(data: mmap.mmap, path: Path) -> Iterator[Part]:
    """The lines of a packed file from the last one on, each with the borders of its frame. Only what follows the last whole frame may be torn."""
    stop, last = len(data), True
    while stop:
        # A frame begins with MAGIC, and so may, by chance, something inside one: what is a frame its checksum tells.
        start, size, text = stop, 0, b""
        while not text:
            start = data.rfind(MAGIC, 0, start)
            if start < 0:
                start = 0
                break
            size, text = _unpack(data, start, stop)
        if start + size < stop:
            if not last:
                raise PlanFormatError(f"{path}: {stop - start - size} bytes from byte {start + size} on are no frame, but whole frames follow")
            yield start + size, stop, None
        if not text:
            return
        lines = text.splitlines(keepends=True)
        if not all(_complete(line, True) for line in lines):
            raise PlanFormatError(f"{path}: the frame from byte {start} to {start + size} does not hold lines of JSON objects")
        yield from ((start, start + size, line) for line in reversed(lines))
        stop, last = start, False


def _unpack(data: mmap.mmap | bytes, start: int, stop: int) -> tuple[int, bytes]:
    """(bytes, content) of the frame that begins at `start`; (0, b"") if none that is whole does."""
    module = need_zstandard()
    reader = module.ZstdDecompressor().decompressobj()
    parts = []
    try:
        at, size = start, SMALL_FRAME
        while at < stop:
            parts.append(reader.decompress(data[at : min(at + size, stop)]))
            at, size = min(at + size, stop), 2 * size
            if reader.eof:
                return at - start - len(reader.unused_data), b"".join(parts)
    except module.ZstdError:
        pass
    return 0, b""


# ---------------------------------------------------------------------------------------------------------------- reading
def read_plans(path: Path | str, report: Report = _nobody, check_hash: bool = True) -> Iterator[StepPlan]:
    """The plans of a file, or of a run folder, in order, each step once (a step written again replaces nothing: PlanWriter cut the earlier one).

    Packed or not is seen from the content. An interrupted end stops the reading; `report` gets one line that says so. Anything wrong before
    it is an error: PlanFormatError with file and line number.
    """
    path = find_plans(path)
    headers: dict[str, Any] = {}
    with open(path, "rb") as file:
        begin = file.read(4)
        file.seek(0)
        packed = begin == MAGIC or (path.suffix == ".zst" and begin[:1] != b"{" and begin != b"")
        for number, value in enumerate(_packed_values(file, path) if packed else _values(file, path), 1):
            where = f"{path}:{number}"
            if isinstance(value, str):
                report(f"{path}: {value}; read up to the last complete {'frame' if packed else 'line'}")
                return
            if "sha256" in value:
                if set(value) != {"sha256", "value"} or sha256_of(value["value"]) != value["sha256"]:
                    raise PlanFormatError(f"{where}: header line does not hash to its sha256 {value['sha256']}")
                headers[value["sha256"]] = value["value"]
                continue
            try:
                yield from_json(_with_values(value, headers), check_hash)
            except PlanFormatError as error:
                raise PlanFormatError(f"{where}: {error}") from None


def _with_values(document: dict[str, Any], headers: dict[str, Any]) -> dict[str, Any]:
    """A plan's line with what stands in headers in its place."""
    document = dict(document)
    for name in SHARED:
        if isinstance(document.get(name), dict) and set(document[name]) == {"ref"}:
            digest = document[name]["ref"]
            if digest not in headers:
                raise PlanFormatError(f"{name}: no header line {digest} above it")
            document[name] = headers[digest]
    return document


def _values(file: IO[bytes], path: Path) -> Iterator[dict[str, Any] | str]:
    """The object of every line; at a torn end what is wrong with it. Damage is forgiven in the last line only."""
    damaged = ""
    for number, line in enumerate(file, 1):
        if damaged:
            raise PlanFormatError(f"{path}:{number - 1}: {damaged}")
        value = _value(line)
        if value is None:
            damaged = f"not a complete JSON object ({len(line)} bytes, interrupted or damaged)"
        else:
            yield value
    if damaged:
        yield f"line {number} is {damaged}"


def _value(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        value = None
    return value if isinstance(value, dict) else None


def _packed_values(file: IO[bytes], path: Path) -> Iterator[dict[str, Any] | str]:
    """The same of a packed file."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0
        while at < len(data):
            size, text = _unpack(data, at, len(data))
            if not size:
                following = at
                while (following := data.find(MAGIC, following + 1)) >= 0:
                    if _unpack(data, following, len(data))[0]:
                        raise PlanFormatError(f"{path}: no whole frame at byte {at}, but one follows at byte {following}: damaged")
                yield f"the last {len(data) - at} bytes are not a complete frame (interrupted or damaged)"
                return
            for line in text.splitlines(keepends=True):
                value = _value(line)
                if value is None:
                    raise PlanFormatError(f"{path}: the frame at byte {at} does not hold lines of JSON objects")
                yield value
            at += size
