"""docs/api.md from docstrings and signatures: `python tools/api_docs.py` writes it, `--check` only says whether it is true (a test does).

Sources are parsed, not imported: no torch is needed, and what a page says of a name is what stands above it in the code.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
# Title, what for, and of each module the public names, in the order of the page.
PARTS: tuple[tuple[str, str, tuple[tuple[str, tuple[str, ...]], ...]], ...] = (
    (
        "Any model",
        "Training a PyTorch or transformers model that is not this project's with data-driven plans: docs/any_model.md.",
        (("interop/any_model.py", ("*",)),),
    ),
    (
        "The planner",
        "From the lengths of a step's documents to its plan. No torch.",
        (
            ("plan/planner.py", ("planner_for", "Planner", "Planner.__call__")),
            ("plan/basis.py", ("Basis", "basis_from")),
            ("plan/limits.py", ("Limits", "limits_from")),
            ("plan/baselines.py", ("static_best", "static_any", "static_fixed", "bucket", "compare")),
            ("plan/baseline_megatron.py", ("megatron_balanced",)),
            ("plan/lower_bound.py", ("lower_bound",)),
            ("plan/bound_1f1b.py", ("lower_bound_1f1b",)),
            ("plan/exact.py", ("*",)),
            ("plan/ahead.py", ("*",)),
        ),
    ),
    (
        "The plan",
        "The value that describes one optimizer step, its JSON, its files, its costs and times.",
        (
            ("plan/step_plan.py", ("StepPlan", "Microbatch", "Recompute", "Layout", "ModelShape", "Profile", "Predicted", "PlanFormatError")),
            ("plan/step_plan.py", ("to_json", "from_json", "plan_hash")),
            ("plan/plan_file.py", ("PlanWriter", "PlanWriter.append", "PlanWriter.close", "read_plans", "find_plans")),
            ("plan/cost.py", ("CostModel", "CostModel.seconds", "CostModel.stage_seconds", "CostModel.best_kind", "Load")),
            ("plan/memory.py", ("MemoryModel", "MemoryModel.static", "MemoryModel.budget", "MemoryModel.bytes", "MemoryModel.peaks")),
            ("plan/simulate.py", ("simulate", "run", "step_seconds", "overhead_seconds", "Timeline", "Event")),
            ("plan/figures.py", ("figures", "Figures", "model_flops")),
        ),
    ),
    ("Verify", "The proof that a plan is legal: docs/plan.md section 2.", (("plan/verify.py", ("verify", "PlanError")),)),
    (
        "Data",
        "From Megatron's .bin/.idx to the packs of a lane.",
        (
            ("data/indexed.py", ("*",)),
            ("data/order.py", ("*",)),
            ("data/step_documents.py", ("*",)),
            ("data/batch.py", ("*",)),
            ("data/tokenizer.py", ("*",)),
        ),
    ),
)
HEAD = """# Python interface

What a program of one's own may build on, with shapes and units. Made from the code's signatures and docstrings by `python tools/api_docs.py`;
a test keeps it true. Lengths and capacities are tokens, times seconds, sizes bytes, unless a name says otherwise. A document's id in a plan is its
place in the step's list of lengths. Refusals are `megadcp.config.check.UserError`: one line that says what was asked, what is wrong and what would
work.

```python
from megadcp.config.load import compose
from megadcp.plan.planner import planner_for
from megadcp.plan.verify import verify

config = compose(["model=gpt_8b", "cluster=h200_4x8", "hardware=h200", "precision=bf16", "run.name=mine"])
plan = planner_for(config)(0, [120_000, 900, 512, 4_000] * 8)  # step 0, tokens of each document
verify(plan)
print(plan.predicted.seconds, [(one.lane, one.cp, one.documents) for one in plan.microbatches])
```
"""


def page() -> str:
    """The text of docs/api.md."""
    text = [HEAD]
    for title, about, modules in PARTS:
        text.append(f"## {title}\n\n{about}\n")
        before = ""
        for name, wanted in modules:
            path = ROOT / "megadcp" / name
            if not path.is_file():
                raise SystemExit(f"tools/api_docs.py names megadcp/{name}, which is not there")
            module = f"megadcp.{name.removesuffix('.py').replace('/', '.')}"
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if module != before:
                text.append(f"### `{module}`\n\n{_docstring(tree)}\n")
            before = module
            for one in _chosen(tree, wanted, module):
                text.append(one)
    return "\n".join(text)


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return _markdown(inspect.cleandoc(ast.get_docstring(node) or ""))


def _markdown(text: str) -> str:
    """A docstring as it stands, its lists and indented parts kept; what markdown would take for markup is not."""
    lines, code = [], False
    for line in text.splitlines():
        deep = line.startswith("    ") and not line.lstrip().startswith(("-", "*"))
        if deep and not code and lines and lines[-1]:
            lines.append("")
        lines.append(line if deep else line.replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*").replace("_", "\\_"))
        code = deep
    return "\n".join(lines)


def _chosen(tree: ast.Module, wanted: tuple[str, ...], module: str) -> Iterator[str]:
    """An entry for each name; "*" stands for all public functions and classes with their public methods."""
    found: dict[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{each.name}": each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    public = [name for name in found if not any(part.startswith("_") for part in name.split("."))]
    for name in public if wanted == ("*",) else wanted:
        if name not in found:
            raise SystemExit(f"tools/api_docs.py names {module}.{name}, which is not there")
        yield _entry(name, found[name])


def _entry(name: str, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Signature, fields of a dataclass or named tuple, docstring."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        fields = [f"    {ast.unparse(each)}" for each in node.body if isinstance(each, ast.AnnAssign)]
        made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        lines = [f"class {name}({bases})" if bases else f"class {name}", *fields]
        lines += [f"    {_signature('__init__', each)}" for each in made]
        return _block(lines, node)
    if any(ast.unparse(each) in ("property", "cached_property") for each in node.decorator_list):
        return _block([f"{name}: {ast.unparse(node.returns) if node.returns else 'Any'}  # property"], node)
    return _block([_signature(name, node)], node)


def _block(lines: list[str], node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    said = _docstring(node)
    return "```python\n" + "\n".join(lines) + "\n```\n" + (f"\n{said}\n" if said else "")


def _signature(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.unparse(node.args)
    for own in ("self, ", "self", "cls, ", "cls"):
        if "." in name or name == "__init__":
            arguments = arguments.removeprefix(own) if arguments == own or own.endswith(", ") else arguments
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}({arguments}){returns}"


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    if parser.parse_args().check:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
        print("docs/api.md is up to date" if same else "docs/api.md is out of date: python tools/api_docs.py")
        return 0 if same else 1
    PAGE.write_text(page(), encoding="utf-8")
    print("wrote docs/api.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
