"""docs/config.md from the schema: `python tools/config_docs.py` writes it, `--check` only says whether it is true (a test does)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from megadcp.config.schema import MISSING, Config, settings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
HEAD = """# Settings

Every setting of a run, with its unit and the reason it exists. This page is made from `megadcp/config/schema.py` by
`python tools/config_docs.py`; a test keeps it true.

- A setting is given as `name=value`: `python pretrain_gpt.py optim.lr=3e-4 model.layers=6 run.name=deeper`.
- A group takes one of the files in `configs/GROUP/`: `model=gpt_8b cluster=h200_4x8`. A whole run is `experiment=NAME`.
- The defaults below are the schema's; the files of the groups set others. `--cfg job` prints what holds, `--info defaults` says which
  files it comes from.
- `-m optim.lr=1e-3,3e-3` runs one job after another, each in a run folder named after its overrides.
- Unknown names (also with a plus), wrong types, values out of range and contradictions are refused before anything starts.
- `run.yaml` in the run folder holds the settings in force. Calling again resumes the run. Settings of `log`, `checkpoint`, `cluster`,
  `hardware` and `plan`, `data.cache`, `data.prepare`, `run.validate_*` and `run.sample_*` may then differ: they say where and how steps
  run, what is saved and what is shown. `run.steps` may differ where that leaves the steps already done as they are
  (`optim.schedule=constant`; `wsd` before its decay). All other changes are refused and need a `run.name` of their own.
- A list of sources is written as `'data.train=[{prefix: A, weight: 0.7}, {prefix: B, weight: 0.3}]'`; `data.train.0.prefix=C` changes one.
"""


def page() -> str:
    """The text of docs/config.md."""
    text = [HEAD]
    for group in dataclasses.fields(Config):
        text += [f"\n## {group.name}: {group.metadata['why']}\n", "| setting | default | unit | why |", "| --- | --- | --- | --- |"]
        for name, field in settings():
            if name.split(".")[0] == group.name:
                text.append(f"| `{name}` | {_default(field)} | {field.metadata['unit']} | {_why(field)} |")
    return "\n".join(text) + "\n"


def _default(field: dataclasses.Field) -> str:
    made = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    value = list(made) if isinstance(made, tuple) else made
    if value == MISSING or value == "":
        return "must be given" if value else "empty"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _why(field: dataclasses.Field) -> str:
    choices = field.metadata["choices"]
    return field.metadata["why"] + (f" (legal: {', '.join(f'`{each}`' for each in choices)})" if choices else "")


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    if parser.parse_args().check:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page()
        print("docs/config.md is up to date" if same else "docs/config.md is out of date: python tools/config_docs.py")
        return 0 if same else 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
