"""Weights to and from Hugging Face.

python tools/convert_checkpoint.py to-hf runs/quickstart exported/quickstart --verify        a run's newest checkpoint as a Hugging Face folder
python tools/convert_checkpoint.py from-hf DOWNLOADED/llama imported/llama --verify           a Hugging Face folder as weights to start runs from

to-hf writes config.json, safetensors (with an index above --max-shard-size), generation_config.json and the tokenizer; it takes a run (--step
for another than the newest checkpoint), a checkpoint folder, an import or a Hugging Face folder. from-hf writes the weights under this
program's names, their settings as model=NAME and experiment=NAME for --config-dir, and the tokenizer. Only safetensors is read. Weights alone
change hands: a run that starts from them begins with a new optimizer. Exit codes: 0 done, 1 can't be written, 2 the request can't be carried out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from megadcp.config.check import UserError
from megadcp.config.run_file import to_dict
from megadcp.data.tokenizer import open_tokenizer
from megadcp.interop import hf
from megadcp.interop.hf_files import write_tensors
from megadcp.interop.json_files import write_json
from megadcp.train.exchange import FORMAT, IMPORT, TOKENIZER_FILES
from megadcp.train.weights import STEM, Weights, export_of, logits_of, open_weights

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("to-hf", help="write a Hugging Face folder", allow_abbrev=False)
    out.add_argument("source", type=Path, help="run, checkpoint, import or Hugging Face folder")
    out.add_argument("out", type=Path, help="folder to write; it must not exist")
    out.add_argument("--step", type=int, help="the run's checkpoint of this step (default: the newest)")
    out.add_argument("--max-shard-size", type=size, default=hf.SHARD_BYTES, help="most bytes of one file, as in 500MB (default 5GB)")
    out.add_argument("--trim-vocab", action="store_true", help="leave out rows of the vocabulary that the tokenizer has no token for")
    out.add_argument("--context", type=int, help="longest text to name in config.json, in tokens (default: data.max_length)")
    back = commands.add_parser("from-hf", help="read a Hugging Face folder", allow_abbrev=False)
    back.add_argument("source", type=Path, help="folder with config.json and safetensors")
    back.add_argument("out", type=Path, help="folder to write; it must not exist")
    back.add_argument("--ignore", action="append", default=[], metavar="FIELD", help="a field of config.json that is unknown here and does no harm")
    for each in (out, back):
        each.add_argument("--dtype", choices=tuple(hf.DTYPES), default="", help="format of the weights (default: as they are stored)")
        each.add_argument("--verify", action="store_true", help="compare logits on random tokens with transformers; nothing is left if they differ")
    return parser.parse_args(argv)


def size(text: str) -> int:
    """Bytes of 500MB, 5GB, 2GiB or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in UNITS or not (value := int(float(match[1]) * UNITS[match[2].upper()])):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; legal here: 500MB, 5GB, 2GiB or bytes")
    return value


def to_hf(options: argparse.Namespace) -> list[str]:
    """Carry out to-hf; lines for people."""
    weights = open_weights(options.source, options.step)
    if options.context is not None and options.context < 1:
        raise UserError(f"--context {options.context}: at least 1")
    how = hf.Options(options.dtype, options.max_shard_size, options.trim_vocab, logits_of if options.verify else None)
    said = hf.write_folder(export_of(weights, options.context), options.out, how)
    return [f"{weights.where} -> {options.out}", *said]


def from_hf(options: argparse.Namespace) -> list[str]:
    """Carry out from-hf; lines for people."""
    out: Path = options.out
    if out.exists():
        raise UserError(f"{out} exists; choose another folder, or remove it")
    if not (options.source / hf.CONFIG).is_file():
        raise UserError(f"{options.source} has no {hf.CONFIG}; give the folder of a Hugging Face model")
    if options.verify:
        from megadcp.interop.hf_verify import need_transformers

        need_transformers()
    weights = open_weights(options.source, ignored=options.ignore)
    if options.dtype:
        weights = replace(weights, tensors=weights.tensors.cast(hf.DTYPES[options.dtype]))
    draft = out.with_name(f".{out.name}.{os.getpid()}.draft")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft.mkdir()
    try:
        said = write_import(weights, options.source, draft, out)
        if options.verify:
            from megadcp.interop.hf_verify import verify

            said.insert(-1, verify(options.source, weights.model, open_weights(draft).tensors, None, logits_of))
        os.rename(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return said


def write_import(weights: Weights, source: Path, draft: Path, out: Path) -> list[str]:
    """Everything of an import into `draft`, which becomes `out`; lines for people, the last one a command that starts a run."""
    files = write_tensors(draft, weights.tensors, hf.SHARD_BYTES, STEM)
    said = [f"{source} -> {out}: {len(weights.tensors)} tensors in {len(files)} file{'s' if len(files) > 1 else ''}", *weights.notes]
    kind = None
    if weights.tokenizer is not None:
        kind = weights.tokenizer.kind
        if kind != "bytes":
            for name in COPIED:
                if (source / name).is_file():
                    shutil.copyfile(source / name, draft / name)
        tokenizer = open_tokenizer(kind, str(draft / TOKENIZER_FILES[kind]) if kind != "bytes" else "")
        said.append(f"tokenizer: {kind}, {tokenizer.vocab_size} tokens")
        if tokenizer.vocab_size > weights.model.vocab:
            raise UserError(f"{source}: the tokenizer has {tokenizer.vocab_size} tokens, the model {weights.model.vocab}: they don't belong together")
    else:
        said.append("tokenizer: none is there; name the one that made your data (data.tokenizer)")
    about = {"format": FORMAT, "model": to_dict(weights.model), "context": weights.context, "tokenizer": kind, "source": weights.source}
    write_json(draft / IMPORT, about)
    name = out.name if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", out.name) else "imported"
    write_configs(weights, kind, draft / "configs", out.resolve(), name)
    said.append("weights only: optimizer, learning rate, data order and counters of a run that starts from them begin anew")
    named = "" if kind else " data.tokenizer.path=TOKENIZER"
    said.append(f"next: python pretrain_gpt.py --config-dir {out}/configs experiment={name} 'data.train=[{{prefix: PATH}}]'{named} run.name=NAME")
    return said


def write_configs(weights: Weights, kind: str | None, configs: Path, out: Path, name: str) -> None:
    """model/NAME.yaml and experiment/NAME.yaml, for --config-dir."""
    for group in ("model", "experiment"):
        (configs / group).mkdir(parents=True)
    settings = yaml.safe_dump(to_dict(weights.model), sort_keys=False)
    (configs / "model" / f"{name}.yaml").write_text(f"# The model of the weights in {out.name}.\n{settings}", encoding="utf-8")
    values: dict[str, object] = {"run": {"init_from": str(out)}}
    if kind is not None:
        values["data"] = {"tokenizer": {"kind": kind, "path": str(out / TOKENIZER_FILES[kind]) if kind != "bytes" else ""}}
    if weights.context < 1024:  # what data=corpus sets
        values["data"] = {**values.get("data", {}), "max_length": weights.context}  # type: ignore[dict-item]
    head = f"# @package _global_\n# A run on your own corpus that starts from the weights in {out.name}.\n"
    head += f"defaults:\n  - override /model: {name}\n  - override /data: corpus\n\n"
    (configs / "experiment" / f"{name}.yaml").write_text(head + yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def main(argv: list[str]) -> int:
    """Exit code of one call."""
    options = arguments(argv)
    try:
        for line in to_hf(options) if options.command == "to-hf" else from_hf(options):
            print(line)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
