"""What tools/gpu_check.py prints: rows as tables, the fitted coefficients, and what was aimed at beside what was found. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
Report = dict[str, Any]
HIDDEN = ("status",)
WIDEST = 60
MERGED = 3  # rows with the same reason for being absent become one line above this many


def report_lines(report: Report) -> list[str]:
    """All of a report."""
    device = report.get("device") or {}
    lines = ["", headline(report), f"torch {device.get('torch')}, Python {device.get('python')}, Transformer Engine: {device.get('te')}"]
    for name, section in report["sections"].items():
        lines += ["", f"{name}: {_state(section)}", *_table(section.get("rows") or [])]
        if name == "fit" and section.get("profile"):
            lines += [f"  {line}" for line in section["profile"]["lines"]]
        if section.get("median_error") is not None:
            lines.append(f"  predicted against measured: median error {section['median_error']:.1%}, worst {section['worst_error']:.1%}")
        if section.get("left_out"):
            lines.append(f"  left out, no time: {_some(section['left_out'])}")
        if section.get("output"):
            lines.append(
                f"  its last words: {section['output'].strip().splitlines()[-1][:200]}" if section["output"].strip() else "  it said nothing"
            )
    lines += ["", "targets", *_table(report.get("targets") or [])]
    return lines


def headline(report: Report) -> str:
    """What was measured, and plainly so where it is no GPU."""
    device = report.get("device") or {}
    quick = ", tiny sizes" if report.get("quick") else ""
    if device.get("cuda"):
        return f"{device['name']}, {device['memory_bytes'] / 1e9:.0f} GB, CUDA {device['cuda_version']}{quick}"
    return f"{device.get('name', 'nothing')}{quick}: A CPU, NO GPU. Rates and errors below say nothing about a GPU; peaks and MFU are not known."


def section_line(name: str, section: Row) -> str:
    """One section, as soon as it is done."""
    return f"{name:<10} {section['seconds']:6.1f} s  {_state(section)}"


def _state(section: Row) -> str:
    rows = section.get("rows") or []
    absent = sum("status" in row for row in rows)
    parts = [section["status"], f"{len(rows) - absent} rows"]
    parts += [f"{absent} not there"] if absent else []
    parts += [f"{len(section['left_out'])} left out"] if section.get("left_out") else []
    return ", ".join(parts) + (f": {section['error']}" if section.get("error") else "")


def _some(names: Sequence[str]) -> str:
    shown = "; ".join(names[:6])
    return shown + (f"; and {len(names) - 6} more" if len(names) > 6 else "")


# ------------------------------------------------------------------------------------------------------------------------ tables
def _table(rows: Sequence[Row]) -> list[str]:
    """Rows with numbers as columns; the others below, those with one reason together."""
    whole = [row for row in rows if "status" not in row]
    columns = list(dict.fromkeys(name for row in whole for name in row))
    cells = [columns, *([_cell(row.get(name)) for name in columns] for row in whole)] if whole else []
    widths = [max(len(line[number]) for line in cells) for number in range(len(columns))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "status" in row:
            named = " ".join(_cell(value) for name, value in row.items() if name not in HIDDEN)
            reasons.setdefault((str(row.get("backend", "")), row["status"]), []).append(named)
    for (backend, reason), names in reasons.items():
        if len(names) > MERGED:
            lines.append(f"  {backend or 'others'} ({len(names)} rows): {reason}")
        else:
            lines += [f"  {name}: {reason}" for name in names]
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)[:WIDEST]


# ----------------------------------------------------------------------------------------------------------------------- targets
def targets_of(report: Report) -> list[Row]:
    """What this project aims at on an H200, beside what was measured: met, missed, or not measured (null)."""
    cuda = bool((report.get("device") or {}).get("cuda")) and not report.get("quick")
    gemm, layers = (_rows(report, name) if cuda else [] for name in ("gemm", "layers"))
    eight = [row for row in layers if row["model"] == "gpt_8b" and row["tokens"] == 8192 and row.get("mfu")]
    products = [row["both"] for row in gemm if row["what"] == "linears" and row["model"] == "gpt_8b" and row["format"].startswith("fp8")]
    found = (
        ("fp8 linears of the 8b model, TFLOP/s, forward + backward", 650.0, max(products, default=None)),
        ("8b layers at 8k tokens in fp8, share of the bf16 peak", 0.60, _least_best(eight, "fp8", "")),
        ("8b layers at 8k tokens, torch backend in bf16, MFU", 0.45, _least_best(eight, "bf16", "torch")),
    )
    return [{"target": name, "at_least": aim, "found": got, "met": None if got is None else got >= aim} for name, aim, got in found]


def _least_best(rows: Sequence[Row], format: str, backend: str) -> float | None:
    """The best backend and recipe for each packing; of those the least."""
    chosen = [row for row in rows if row["format"].startswith(format) and backend in row["backend"]]
    best = [max(row["mfu"] for row in chosen if row["packing"] == packing) for packing in {row["packing"] for row in chosen}]
    return min(best, default=None)


def _rows(report: Report, name: str) -> list[Row]:
    return [row for row in (report["sections"].get(name) or {}).get("rows") or [] if "status" not in row]
