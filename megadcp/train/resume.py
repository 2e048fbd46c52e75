"""What may differ when a run goes on, and what a difference means for the order of its documents.

Three kinds of settings. FREE ones say where and how steps run, what is saved and what is shown: they may always change. Of the others, those
named in checkpoint.allow_change may, where that is possible: they hold from the next step on. FIXED ones decide the shapes of what a
checkpoint holds: they need a new run.

The document order after a change of data.* is that of the new settings from the SAME step number on. What the run has read before is not
asked: with another blend or corpus some documents come again and others never. Only where nothing but data.tokens_per_step differs the order
stays the same sequence, and it goes on at the first step of the new size that begins where the old one ended, or behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megadcp.config.check import UserError
from megadcp.config.run_file import differences, from_dict
from megadcp.config.schema import Config
from megadcp.data.fingerprints import changed_files, dataset_files, prints_of
from megadcp.data.step_documents import DocumentSource, StepDocuments
from megadcp.train.incidents import add_incident
from megadcp.train.run_folder import write_json

FREE = (
    "log.", "checkpoint.", "cluster.", "parallel.", "hardware.", "plan.", "health.", "data.cache", "data.prepare.",
    "run.name", "run.folder", "run.validate_", "run.sample_",
)  # fmt: skip
FIXED = (
    "model.layers", "model.hidden", "model.heads", "model.kv_heads", "model.head_dim", "model.ffn", "model.vocab", "model.norm", "model.position",
    "model.max_position", "model.mlp", "model.qkv_bias", "model.out_bias", "model.mlp_bias", "model.qk_norm", "model.tied", "precision.format",
)  # fmt: skip
PRINTS = "data.json"
ORDER = ("data.train", "data.split", "data.mode", "data.max_length", "data.long_documents", "data.tokens_per_step", "data.seed", "data.mask_eod_loss")


def is_allowed(config: Config, key: str) -> bool:
    """Whether checkpoint.allow_change names the setting, the list that it is in, or its group."""
    return any(key == one or key.startswith((f"{one}.", f"{one}[")) for one in config.checkpoint.allow_change)


def may_reorder(config: Config) -> bool:
    """Whether the order of documents may be another than the checkpoint's."""
    return any(is_allowed(config, key) or any(one.startswith(key) for one in config.checkpoint.allow_change) for key in ORDER)


def may_retokenize(config: Config) -> bool:
    """Whether the tokenizer may be another than the checkpoint's."""
    return any(one in ("data", "data.tokenizer") or one.startswith("data.tokenizer.") for one in config.checkpoint.allow_change)


def refused(changed: Iterable[str], config: Config) -> list[str]:
    """Those of the changed settings that may not."""
    return [key for key in changed if not key.startswith(FREE) and (is_fixed(key) or not is_allowed(config, key))]


def is_fixed(key: str) -> bool:
    """Whether a checkpoint of another value can't be used."""
    return key in FIXED


def ways_out(keys: Iterable[str]) -> str:
    """What somebody can do whose change of `keys` was refused."""
    keys = list(keys)
    fixed = [key for key in keys if is_fixed(key)]
    if fixed:
        return f"{', '.join(fixed)} can't change in a run: a checkpoint of another value doesn't fit; choose run.name=NAME for a new run"
    names = ",".join(dict.fromkeys(re.sub(r"\[.*", "", key) for key in keys))
    return (
        "choose run.name=NAME for a new run, leave these settings as they were to go on with the old one, or ask for the change by name: "
        f"checkpoint.allow_change=[{names}] (it holds from the next step on)"
    )


# ------------------------------------------------------------------------------------------------------------- document order
class ShiftedSource:
    """The steps of a source with other numbers: step s of the run has the documents of step s + shift of the order."""

    def __init__(self, source: DocumentSource, shift: int) -> None:
        self.source, self.shift = source, shift
        self.fingerprint = source.fingerprint  # of the order, which the shift is no part of

    def build(self) -> None:
        """See DocumentSource.build."""
        self.source.build()

    def describe(self) -> list[str]:
        """See DocumentSource.describe."""
        return self.source.describe()

    def step(self, index: int) -> StepDocuments:
        """See DocumentSource.step."""
        return replace(self.source.step(index + self.shift), step=index)

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """See Documents.read."""
        return self.source.read(document)

    def fill(self, ids: np.ndarray, starts: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
        """See Documents.fill."""
        self.source.fill(ids, starts, tokens, labels)


def new_place(old: Config, new: Config, place: int) -> tuple[int, str]:
    """(next step of the new order, what that means) for a run that stood at step `place` of the old order."""
    changed = [key for key in differences(old, new) if any(key.startswith(one) for one in ORDER)]
    if changed == ["data.tokens_per_step"] and new.data.mode == "documents":
        before, after = old.data.tokens_per_step, new.data.tokens_per_step
        there = -(-place * before // after)
        return there, (
            f"the sequence of documents stays the same and goes on at token {there * after:,} of it (token {place * before:,} was reached), which "
            f"is step {there:,} of {after:,} tokens each"
        )
    return place, (
        f"from here on it is step {place:,} of the new order and so on; what was read before is not asked, so some documents may come again and "
        "others never"
    )


def say_changes(
    meta: Mapping[str, Any], config: Config, order: str, place: int, say: Callable[[str], None], incident: Callable[..., None]
) -> int:  # fmt: skip
    """Tell, loudly where it matters, what is no longer as it was when the checkpoint was saved; the step of the order that comes next.

    meta: of the checkpoint; order: fingerprint of the order as it is now; place: the step of the order at which the checkpoint stood.
    """
    step = int(meta["step"])
    try:
        old = from_dict(meta["config"])
    except (KeyError, UserError) as error:
        say(f"the checkpoint's settings can't be compared with today's: {error}")
        return place
    for name, (before, after) in differences(old, config).items():
        text = f"setting changed since step {step:,}: {name} {before} -> {after}; the new value holds from here on"
        say(text)
        if not name.startswith(FREE):
            incident("setting_changed", text, setting=name, old=before, new=after)
    if meta.get("order") and meta["order"] != order:
        place, text = new_place(old, config, place)
        text = f"the order of the documents has changed since step {step:,}: {text}"
        say(f"WARNING: {text}")
        incident("order_changed", text, place=place)
    return place


# ------------------------------------------------------------------------------------------------------------------- data files
def check_files(folder: Path, config: Config, began: bool, say: Callable[[str], None]) -> None:
    """Compare the data files of a run with those it began with (data.json in its folder), and remember what is new. By one process.

    began: something has been trained already; before that any files will do.

    Raises:
        UserError: a file has changed, and checkpoint.allow_change does not name what it is for. Nothing was written.
    """
    now, before = prints_of(dataset_files(config.data)), _known_prints(folder, say) if began else {}
    trained = {str(path.absolute()) for path in dataset_files(replace(config.data, validation=()))}
    changed = []
    for name, allowed in (("data.train", may_reorder(config)), ("data.validation", is_allowed(config, "data.validation"))):
        found = changed_files(before, {path: one for path, one in now.items() if (path in trained) == (name == "data.train")})
        if found and not allowed:
            raise UserError(
                f"the data has changed under {folder}: {'; '.join(found)}. Put the files back, choose run.name=NAME for a new run, or go on with the "
                f"new ones: checkpoint.allow_change=[{name}]"
            )
        changed += found
    for one in changed:
        say(f"WARNING: {one} (asked for by checkpoint.allow_change)")
        add_incident(folder, "data_changed", None, one)
    if not before or before | now != before:
        write_json(folder / PRINTS, before | now)


def _known_prints(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """What the run remembers; nothing where it has no such file (yet), or a damaged one, which is told."""
    try:
        found = json.loads((folder / PRINTS).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        say(f"WARNING: {folder / PRINTS} can't be read ({error}): whether the data has changed under the run is not known")
        return {}
    return found
