"""Hugging Face folders in and out: config.json, safetensors, tokenizer, generation settings.

Works on plain tensors under our parameter names and on a ModelConfig; where they come from is the caller's affair. What is written appears
under its name when it is complete, never before.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadcp.config.check import UserError
from megadcp.config.schema import ModelConfig, TokenizerConfig
from megadcp.data.tokenizer import Tokenizer, open_tokenizer
from megadcp.interop.hf_config import Described, family_of, read_config, write_config
from megadcp.interop.hf_files import read_tensors, write_tensors
from megadcp.interop.hf_names import as_ours, as_theirs, cut_rows, entries, our_shapes, their_shapes
from megadcp.interop.hf_tokenizer import write_tokenizer
from megadcp.interop.json_files import read_json, write_json
from megadcp.interop.tensors import LazyTensors, lazy, mismatches

CONFIG, GENERATION, ABOUT = "config.json", "generation_config.json", "megadcp.json"
SHARD_BYTES = 5_000_000_000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TABLES = ("embedding.weight", "head.weight")
BUFFERS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq")  # constants that old files hold beside the weights


# --------------------------------------------------------------------------------------------------------------------- in
@dataclass(frozen=True)
class HfFolder:
    """A folder whose config was understood and whose tensors fit it. tensors: under our names. tokenizer: the one beside the weights, if any."""

    path: Path
    described: Described
    tensors: LazyTensors
    tokenizer: TokenizerConfig | None
    about: dict[str, Any]

    @property
    def model(self) -> ModelConfig:
        """What the weights are of."""
        return self.described.model


def is_folder(path: Path) -> bool:
    """Whether it looks like one."""
    return (path / CONFIG).is_file()


def describe_folder(path: Path, ignored: Iterable[str] = ()) -> Described:
    """What its config.json says. UserError names what we have nothing for."""
    return read_config(read_json(path / CONFIG), str(path / CONFIG), ignored)


def open_folder(path: Path, ignored: Iterable[str] = ()) -> HfFolder:
    """Read config.json and the list of tensors; values are read later, one by one.

    ignored: unknown fields of config.json that a person found to be without effect.

    Raises:
        UserError: an unknown field or family; missing, extra or misshapen tensors; a tied flag that the tensors contradict; no safetensors.
    """
    described = describe_folder(path, ignored)
    model = described.model
    raw = _with_prefix(read_tensors(path, skip=lambda name: BUFFERS.fullmatch(name) is not None), described.family)
    if model.layers > len(raw):  # before a list of that many names is made
        raise UserError(f"{path} has {len(raw)} tensors, too few for the {model.layers} layers of its {CONFIG}")
    table = entries(model, described.family)
    raw = _without_head_copy(raw, table[0].theirs[0][0], path) if model.tied else raw
    if wrong := mismatches(their_shapes(table), raw.metas):
        raise UserError(f"{path}: its tensors are not those that its {CONFIG} describes. {wrong}")
    about = read_json(path / ABOUT) if (path / ABOUT).is_file() else {}
    return HfFolder(path, described, as_ours(table, raw), _tokenizer_of(path, about), about)


def _with_prefix(tensors: LazyTensors, family: str) -> LazyTensors:
    """Names as the model with its head has them; those of the model without are shorter."""
    prefix = "transformer." if family == "gpt2" else "model."
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    names = {name if name.startswith("lm_head.") else prefix + name: name for name in tensors}
    return LazyTensors({name: tensors.metas[short] for name, short in names.items()}, lambda name: tensors[names[name]])


def _without_head_copy(tensors: LazyTensors, table: str, path: Path) -> LazyTensors:
    """A tied model's file may hold the head too, if it is the same matrix."""
    head = "lm_head.weight"
    if head not in tensors:
        return tensors
    if table in tensors and not _equal(tensors[head], tensors[table]):
        raise UserError(
            f"{path}: {CONFIG} says that the head is tied to the embedding, but {head} and {table} differ; set tie_word_embeddings to false if the "
            "head is its own, or remove it if it is not"
        )
    return LazyTensors({name: meta for name, meta in tensors.metas.items() if name != head}, lambda name: tensors[name])


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.to(other.dtype), other))


def _tokenizer_of(path: Path, about: dict[str, Any]) -> TokenizerConfig | None:
    """The tokenizer that lies in the folder. Where both kinds do, tokenizer.json, unless our own export says that it was made from the other."""
    files = {"huggingface": path / "tokenizer.json", "sentencepiece": path / "tokenizer.model"}
    noted = about.get("tokenizer")
    kind = noted.get("kind") if isinstance(noted, dict) else None
    if kind == "bytes":
        return TokenizerConfig("bytes", "")
    if kind in files and files[kind].is_file():
        return TokenizerConfig(kind, str(files[kind]))
    return next((TokenizerConfig(kind, str(file)) for kind, file in files.items() if file.is_file()), None)


# -------------------------------------------------------------------------------------------------------------------- out
@dataclass(frozen=True)
class Export:
    """What is to be written. context: longest text in tokens. source: where it comes from, as JSON values, for people."""

    model: ModelConfig
    tensors: LazyTensors
    context: int
    tokenizer: TokenizerConfig | None = None
    source: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """How it is to be written. dtype: fp32, bf16, fp16 or "" as stored. trim: leave out rows of the vocabulary that the tokenizer has no token for.

    verify: load what was written with transformers, and compare with the logits that this gives for our model.
    """

    dtype: str = ""
    max_shard_bytes: int = SHARD_BYTES
    trim: bool = False
    verify: Callable[[ModelConfig, LazyTensors, Tensor], Tensor] | None = None


def write_folder(export: Export, folder: Path, options: Options) -> list[str]:
    """Write the folder, which must not exist; returns lines that say what was done.

    Raises:
        UserError: no family computes the same, tensors that the model does not have, no such tokenizer, or logits that differ (verify): then
            nothing is left behind.
        OSError: disk full or not writable; nothing is left behind.
    """
    if folder.exists():
        raise UserError(f"{folder} exists; choose another folder, or remove it")
    if options.dtype and options.dtype not in DTYPES:
        raise UserError(f"dtype={options.dtype} does not exist; legal here: {', '.join(DTYPES)}")
    if options.max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes={options.max_shard_bytes}; legal here: 1 and above")
    if options.verify is not None:
        from megadcp.interop.hf_verify import need_transformers

        need_transformers()
    family_of(export.model)
    tokenizer = open_tokenizer(export.tokenizer.kind, export.tokenizer.path) if export.tokenizer is not None else None
    export, notes = _prepared(export, options, tokenizer)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.draft")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft.mkdir()
    try:
        notes += _write(export, draft, options, tokenizer)
        os.rename(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return notes


def _prepared(export: Export, options: Options, tokenizer: Tokenizer | None) -> tuple[Export, list[str]]:
    """Checked against the model's parameters, cut and cast."""
    model, tensors, notes = export.model, lazy(export.tensors), []
    if model.tied and "head.weight" in tensors and "embedding.weight" in tensors:
        if not _equal(tensors["head.weight"], tensors["embedding.weight"]):
            raise UserError("model.tied=True, but head.weight and embedding.weight differ: a tied export would lose one; set model.tied=False")
        kept = {name: meta for name, meta in tensors.metas.items() if name != "head.weight"}
        tensors = LazyTensors(kept, tensors.__getitem__)
    if wrong := mismatches(our_shapes(entries(model, family_of(model))), tensors.metas):
        raise UserError(f"the weights are not those of the model. {wrong}")
    if tokenizer is not None and tokenizer.vocab_size < model.vocab:
        spare = model.vocab - tokenizer.vocab_size
        if options.trim:
            model = replace(model, vocab=tokenizer.vocab_size)
            tensors = cut_rows(tensors, TABLES, model.vocab)
            notes.append(f"vocabulary: {model.vocab} rows; {spare} without a token are left out (their logits no longer count in probabilities)")
        else:
            notes.append(f"vocabulary: {model.vocab} rows, {spare} of them without a token; kept as trained")
    elif options.trim and tokenizer is None:
        raise UserError("trimming the vocabulary needs the run's tokenizer, and none is named")
    if options.dtype:
        tensors = tensors.cast(DTYPES[options.dtype])
    return replace(export, model=model, tensors=tensors), notes


def _write(export: Export, draft: Path, options: Options, tokenizer: Tokenizer | None) -> list[str]:
    model, family = export.model, family_of(export.model)
    end = tokenizer.eod if tokenizer is not None else None
    theirs = as_theirs(entries(model, family), export.tensors)
    files = write_tensors(draft, theirs, options.max_shard_bytes)
    write_json(draft / CONFIG, write_config(model, export.context, format_of(theirs), end))
    write_json(draft / GENERATION, {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end})
    notes = [f"{family}: {len(theirs)} tensors of {format_of(theirs)} in {len(files)} file{'s' if len(files) > 1 else ''}"]
    about: dict[str, Any] = {"format": 1, "source": export.source}
    if export.tokenizer is not None and tokenizer is not None:
        about["tokenizer"] = {"kind": export.tokenizer.kind, "fingerprint": tokenizer.fingerprint}
        notes += write_tokenizer(draft, export.tokenizer.kind, export.tokenizer.path, tokenizer, export.context)
    else:
        notes.append("tokenizer: none is named, so none is written")
    write_json(draft / ABOUT, about)
    if options.verify is not None:
        from megadcp.interop.hf_verify import verify

        notes.append(verify(draft, model, export.tensors, tokenizer, options.verify))
    return notes


def format_of(tensors: LazyTensors) -> str:
    """Name of the format that most elements are stored in."""
    counts: dict[torch.dtype, int] = {}
    for meta in tensors.metas.values():
        counts[meta.dtype] = counts.get(meta.dtype, 0) + meta.numel()
    return str(max(counts, key=lambda dtype: counts[dtype])).removeprefix("torch.")
