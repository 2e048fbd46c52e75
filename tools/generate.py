"""Text from a trained model: python tools/generate.py runs/quickstart --prompt "def " --tokens 100.

Takes the newest undamaged checkpoint of a run folder (or the one of --step) and prints the prompt and what follows, as it comes. Speed goes to
stderr. Exit codes: 0 done, 2 the request can't be carried out.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import torch

from megadcp.config.check import UserError
from megadcp.config.run_file import load_run
from megadcp.config.schema import Config
from megadcp.data.tokenizer import Tokenizer, open_tokenizer
from megadcp.nn.gpt import GPT
from megadcp.train import checkpoint
from megadcp.train.run_folder import RunFolder
from megadcp.train.sample import Sampling, generate
from megadcp.train.state import build_model, choose_device, load_weights, model_dtype, weights


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools/generate.py", description="Text from a trained model.")
    parser.add_argument("run", help="run folder, for example runs/quickstart")
    parser.add_argument("--prompt", required=True, help="text to go on from")
    parser.add_argument("--tokens", type=int, default=100, help="most new tokens (default 100); it stops earlier where the document ends")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token; the same as --temperature 0")
    parser.add_argument("--temperature", type=float, default=0.8, help="above 1 flatter, below 1 sharper (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="choose among the k likeliest tokens only (default 0: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="choose among the likeliest tokens that reach this share together (default 1: all)")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal text (default 0)")
    parser.add_argument("--step", type=int, help="the checkpoint of this step instead of the newest")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's)")
    return parser.parse_args(argv)


def open_model(folder: Path, step: int | None, device: str) -> tuple[GPT, Tokenizer, checkpoint.Checkpoint]:
    """The model of a run with its trained weights, its tokenizer, and the checkpoint they come from."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a run folder, for example runs/quickstart")
    config = load_run(folder)
    run = RunFolder(folder)
    found = _find(run, step)
    tokenizer = _tokenizer(config)
    if found.meta.get("tokenizer") and found.meta["tokenizer"] != tokenizer.fingerprint:
        raise UserError(f"{config.data.tokenizer.path or 'the tokenizer'} is not the one that {found.path} was trained with; put that one back")
    where = choose_device(dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, device=device)))
    model = build_model(config, where, model_dtype(config)).eval()
    tensors = found.tensors("model")
    checkpoint.require_match(weights(model), tensors, found.path / "model.safetensors")
    load_weights(model, tensors)
    return model, tokenizer, found


def _find(run: RunFolder, step: int | None) -> checkpoint.Checkpoint:
    paths = {int(path.name.removeprefix(checkpoint.PREFIX)): path for path in checkpoint.saved(run)}
    if not paths:
        raise UserError(f"{run.path} has no checkpoint yet; train it first, or wait for its first save (checkpoint.every)")
    if step is None:
        found = checkpoint.newest(run, lambda text: print(text, file=sys.stderr))
        assert found is not None
        return found
    if step not in paths:
        raise UserError(f"{run.path} has no checkpoint of step {step}; there are: {', '.join(map(str, paths))}")
    return checkpoint.open_checkpoint(paths[step])


def _tokenizer(config: Config) -> Tokenizer:
    tokenizer = config.data.tokenizer
    if not tokenizer.path and tokenizer.kind != "bytes":
        raise UserError("the run names no tokenizer (data.tokenizer.path is empty in its run.yaml), so text can't become tokens")
    return open_tokenizer(tokenizer.kind, tokenizer.path)


def write_text(tokenizer: Tokenizer, prompt: list[int], made: list[int], shown: str) -> str:
    """Print what is new since `shown`, and return the whole text. A character of which bytes are missing waits."""
    text = tokenizer.decode([*prompt, *made])
    ready = text.rstrip("\ufffd")
    if ready.startswith(shown):
        print(ready[len(shown) :], end="", flush=True)
        return ready
    return shown


def run(options: argparse.Namespace) -> None:
    """Carry out one request."""
    if options.threads:
        torch.set_num_threads(options.threads)
    model, tokenizer, found = open_model(Path(options.run), options.step, options.device)
    prompt = tokenizer.encode(options.prompt)
    sampling = Sampling(options.tokens, 0.0 if options.greedy else options.temperature, options.top_k, options.top_p, options.seed)
    sampling.check(len(prompt), model.config)
    made: list[int] = []
    shown, ended = write_text(tokenizer, prompt, made, ""), False
    begin = time.perf_counter()
    for token in generate(model, prompt, sampling, tokenizer.vocab_size, tokenizer.eod):
        ended = token == tokenizer.eod
        if not ended:
            made.append(token)
            shown = write_text(tokenizer, prompt, made, shown)
    seconds = time.perf_counter() - begin
    print(tokenizer.decode([*prompt, *made])[len(shown) :])
    why = "the document ends here" if ended else f"{options.tokens} tokens were asked for"
    count = len(made) + ended
    print(f"{found.path.name}: {count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s (no key-value cache); {why}", file=sys.stderr)


def main(argv: list[str]) -> int:
    """Exit code of one call."""
    try:
        run(arguments(argv))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
