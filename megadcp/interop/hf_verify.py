"""A written folder loaded by transformers: its logits beside ours. transformers is imported here alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadcp.config.check import UserError
from megadcp.config.schema import ModelConfig
from megadcp.data.tokenizer import Tokenizer
from megadcp.interop.hf_tokenizer import PROBES
from megadcp.interop.tensors import LazyTensors

Logits = Callable[[ModelConfig, LazyTensors, Tensor], Tensor]  # of our model: ids [t] -> [t, V] fp32
TOKENS = 64
TOLERANCE = 1e-4  # of the largest logit, in fp32
MISSING = 'comparing with transformers needs it: pip install "megadcp[hf]"'


def need_transformers() -> Any:
    """The package; UserError when it is not installed."""
    try:
        import transformers
    except ImportError:
        raise UserError(MISSING) from None
    return transformers


def verify(folder: Path, model: ModelConfig, tensors: LazyTensors, tokenizer: Tokenizer | None, our_logits: Logits) -> str:
    """Compare logits on random tokens, both in fp32 from the weights as they are stored; and ids, where a tokenizer.json was written.

    Returns a line with the largest difference. UserError when it is above TOLERANCE, or tensors or ids are not what transformers expects.
    """
    transformers = need_transformers()
    length = min(TOKENS, model.max_position) if model.position == "learned" else TOKENS
    ids = torch.randint(0, model.vocab, (length,), generator=torch.Generator().manual_seed(0))
    theirs = their_logits(transformers, folder, ids)
    ours = our_logits(model, tensors, ids)
    if ours.shape != theirs.shape:
        raise UserError(f"--verify: transformers gives logits {list(theirs.shape)}, this program {list(ours.shape)}")
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if not difference <= TOLERANCE:
        raise UserError(f"--verify: logits differ by {difference:.1e} of the largest one (tolerance {TOLERANCE:g}); nothing was written")
    said = f"verified: transformers {transformers.__version__} gives the same logits on {length} random tokens (largest difference {difference:.1e})"
    if tokenizer is not None and (folder / "tokenizer.json").is_file():
        _compare_ids(transformers, folder, tokenizer)
        said += f" and the same ids for {len(PROBES)} texts"
    return said


def their_logits(transformers: Any, folder: Path, ids: Tensor) -> Tensor:
    """[t, V] fp32 of transformers; UserError when it misses tensors or finds others."""
    transformers.utils.logging.disable_progress_bar()
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    wrong = {name: list(found)[:5] for name, found in report.items() if found}
    if wrong:
        raise UserError(f"--verify: transformers does not take the tensors as they are: {wrong}")
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=ids[None]).logits[0].float()
    return logits


def _compare_ids(transformers: Any, folder: Path, tokenizer: Tokenizer) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for text in PROBES:
        found, expected = theirs.encode(text, add_special_tokens=False), tokenizer.encode(text)
        if found != expected:
            raise UserError(f"--verify: transformers' tokenizer gives {found[:8]} for {text[:20]!r}, the run's {expected[:8]}")
    if theirs.eos_token_id != tokenizer.eod:
        raise UserError(f"--verify: transformers' tokenizer ends a text with {theirs.eos_token_id}, the run's with {tokenizer.eod}")
