"""Text from a trained model: python tools/generate.py runs/quickstart --prompt "def " --tokens 100.

Takes the newest undamaged checkpoint of a run folder (or the one of --step), a Hugging Face folder or an import, and prints the prompt and what
follows, as it comes. Speed goes to stderr. Exit codes: 0 done, 2 the request can't be carried out.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from megadcp.config.check import UserError
from megadcp.data.tokenizer import Tokenizer, open_tokenizer
from megadcp.nn.gpt import GPT
from megadcp.train.sample import Sampling, generate
from megadcp.train.weights import Weights, device_of, load, open_weights


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools/generate.py", description="Text from a trained model.")
    parser.add_argument("run", help="run folder, for example runs/quickstart; or a Hugging Face folder, or an import")
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


def open_model(folder: Path, step: int | None, device: str) -> tuple[GPT, Tokenizer, Weights]:
    """The model of a run or folder with its trained weights, its tokenizer, and where they come from."""
    weights = open_weights(folder, step)
    if weights.tokenizer is None:
        where = "in its run.yaml)" if weights.config is not None else "and the folder has none)"
        raise UserError(f"{folder} names no tokenizer (data.tokenizer.path is empty {where}, so text can't become tokens")
    tokenizer = open_tokenizer(weights.tokenizer.kind, weights.tokenizer.path)
    if weights.fingerprint and weights.fingerprint != tokenizer.fingerprint:
        raise UserError(f"{weights.tokenizer.path or 'the tokenizer'} is not the one that {weights.where} was trained with; put that one back")
    return load(weights, device_of(device), weights.dtype), tokenizer, weights


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
    print(f"{Path(found.where).name}: {count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s (no key-value cache); {why}", file=sys.stderr)


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
