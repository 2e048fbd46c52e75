"""What a run takes from other programs or runs and gives to them, checked before it starts. No torch.

run.init_from: a run, one of its checkpoints, a Hugging Face folder, or what tools/convert_checkpoint.py imported.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError
from megadcp.config.run_file import from_dict, load_run
from megadcp.config.schema import Config, ModelConfig, TokenizerConfig
from megadcp.interop.hf_config import family_of, read_config
from megadcp.interop.json_files import read_json

HF_CONFIG, IMPORT, CHECKPOINT_META, FORMAT = "config.json", "weights.json", "meta.json", 1
TOKENIZER_FILES = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}
LOOSE = {"init_std", "depth_scaled_init", "embedding_dropout", "residual_dropout", "rope"}  # may differ from those that weights were trained with


def check_exchange(config: Config, begun: bool = False) -> None:
    """Refuse, before anything is made, weights to start from that are of another model, and exports that no family can hold.

    begun: the run has checkpoints of its own, so it needs the weights that it started from no more.

    Raises:
        UserError: says which settings differ, or what stands in the way.
    """
    every, exported = config.checkpoint.every, config.checkpoint.export_every
    if exported:
        family_of(config.model)
        if not every or exported % every:
            legal = f"legal here: {every}, {2 * every}, {3 * every}, .." if every else "set checkpoint.every, too"
            raise UserError(f"checkpoint.export_every={exported} is no multiple of checkpoint.every={every}; {legal}")
    if config.run.init_from and not begun:
        refuse_other_model(config, model_at(Path(config.run.init_from)))


def model_at(path: Path) -> ModelConfig:
    """The model whose weights lie there. UserError when nothing of the kind does."""
    kind = kind_of(path)
    if kind == "run":
        return load_run(path).model
    if kind == "import":
        return read_import(path)[0]
    if kind == "hugging face":
        return read_config(read_json(path / HF_CONFIG), str(path / HF_CONFIG)).model
    return from_dict(read_json(path / CHECKPOINT_META)["config"]).model


def kind_of(path: Path) -> str:
    """run, import, hugging face or checkpoint, by the file that describes it."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give a run folder, for example runs/quickstart, or a Hugging Face folder")
    for name, kind in (("run.yaml", "run"), (IMPORT, "import"), (HF_CONFIG, "hugging face"), (CHECKPOINT_META, "checkpoint")):
        if (path / name).is_file():
            return kind
    raise UserError(
        f"{path} holds no weights: no run (run.yaml does not exist), no checkpoint ({CHECKPOINT_META}), no Hugging Face model ({HF_CONFIG}) and no "
        f"import ({IMPORT})"
    )


def read_import(path: Path) -> tuple[ModelConfig, int, TokenizerConfig | None, dict[str, Any]]:
    """What tools/convert_checkpoint.py left in weights.json: model, longest text in tokens, tokenizer, and where it came from."""
    about = read_json(path / IMPORT)
    try:
        if about["format"] != FORMAT:
            raise UserError(f"{path / IMPORT}: format {about['format']}; this version reads format {FORMAT}")
        model = from_dict({"model": about["model"]}, allow_missing=True).model
        kind = about["tokenizer"]
        tokenizer = None if kind is None else TokenizerConfig(kind, str(path / TOKENIZER_FILES[kind]) if kind != "bytes" else "")
        return model, int(about["context"]), tokenizer, dict(about["source"])
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path / IMPORT} does not describe weights ({error!r}); import them again") from None


def refuse_other_model(config: Config, model: ModelConfig) -> list[str]:
    """UserError where run.init_from has another model than the run; returns rotary settings that differ, which may be meant (longer contexts)."""
    here, there = asdict(config.model), asdict(model)
    wrong = [f"model.{name}={here[name]} (there {there[name]})" for name in here if here[name] != there[name] and name not in LOOSE]
    if wrong:
        raise UserError(f"run.init_from={config.run.init_from} is another model: {', '.join(wrong)}; set these as they are there")
    if config.model.position != "rope":
        return []
    return [f"model.rope.{name}={value} (there {there['rope'][name]})" for name, value in here["rope"].items() if value != there["rope"][name]]
