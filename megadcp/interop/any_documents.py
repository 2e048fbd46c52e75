"""A user's DataLoader as the project's document source: its batches are the global batches, and each rank reads the documents it runs.

The loader itself is not run: its batch sampler says which items form a step, its data set gives them, its collate function and workers stay
unused. So a step holds the same documents as in the plain loop, on any number of ranks.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from megadcp.config.check import UserError
from megadcp.data.step_documents import IGNORE, StepDocuments

Read = tuple[np.ndarray, np.ndarray]  # tokens and labels, int64 [n]
# Keys that say what a document's rows mean or see, and would go unheard: what a collate function makes of them is not used.
MEANINGFUL = (
    "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "inputs_embeds", "pixel_values", "loss_mask", "completion_mask", "assistant_masks",
)  # fmt: skip


def document(item: Any, index: int, vocab: int) -> Read:
    """(tokens, labels) of an item of a data set: token ids, or a mapping with input_ids and perhaps labels and attention_mask.

    labels are as in transformers, one for each token and not yet shifted, -100 where there is no target. Here each row gets the label of the
    next one, and the last one none. Rows that the attention mask hides at either end are left out. UserError for anything else.
    """
    fields = item if isinstance(item, Mapping) else {"input_ids": item}
    if "input_ids" not in fields:
        raise UserError(
            f"item {index} of the data set has no input_ids (it has {', '.join(map(str, fields))}); give token ids, or a mapping with them"
        )
    for name in MEANINGFUL:
        if fields.get(name) is not None:
            raise UserError(
                f"item {index} of the data set has {name}, which is not used here: a document is its input_ids, and labels say what counts"
            )
    if fields.get("token_type_ids") is not None and _integers(fields["token_type_ids"], index).any():
        raise UserError(f"item {index} of the data set has token_type_ids other than 0, which are not used here; leave them out")
    tokens = _integers(fields["input_ids"], index)
    own = tokens if fields.get("labels") is None else _integers(fields["labels"], index)
    if len(own) != len(tokens):
        raise UserError(f"item {index} of the data set has {len(tokens)} input_ids and {len(own)} labels; labels are one for each token, not shifted")
    if fields.get("attention_mask") is not None:
        shown = np.flatnonzero(_integers(fields["attention_mask"], index))
        if len(shown) and len(shown) != shown[-1] - shown[0] + 1:
            raise UserError(f"item {index} of the data set hides tokens in its middle (attention_mask); only padding at its ends can be left out")
        kept = slice(shown[0], shown[-1] + 1) if len(shown) else slice(0, 0)
        tokens, own = tokens[kept], own[kept]
    if not len(tokens):
        raise UserError(f"item {index} of the data set has no tokens; leave empty documents out")
    if tokens.min() < 0 or tokens.max() >= vocab:
        wrong = int(tokens[(tokens < 0) | (tokens >= vocab)][0])
        raise UserError(f"item {index} of the data set has token {wrong}, but the model's vocabulary has ids 0 to {vocab - 1}")
    strange = own[(own != IGNORE) & ((own < 0) | (own >= vocab))]
    if len(strange):
        raise UserError(f"item {index} of the data set has label {strange[0]}; labels are ids from 0 to {vocab - 1}, or {IGNORE} for no target")
    return tokens, np.append(own[1:], IGNORE)


def _integers(values: Any, index: int) -> np.ndarray:
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise UserError(f"item {index} of the data set holds {array.dtype} of shape {array.shape}; a document is one row of token ids")
    return array.astype(np.int64)


class _Indices(Dataset[int]):
    """Item i is i."""

    def __getitem__(self, index: int) -> int:
        return int(index)


class LoaderDocuments:
    """One pass over a DataLoader as a DocumentSource whose steps are asked for in order. `first`: number of its first step."""

    fingerprint = ""

    def __init__(self, loader: DataLoader[Any], lengths: Sequence[int] | None, first: int, keep: int, vocab: int) -> None:
        """lengths: of each item, if they are known: then a rank reads only what it runs. keep: steps whose items are needed later."""
        self._data: Any = loader.dataset
        # A loader of indices draws from the generator exactly what the user's own would have drawn; now, and not in a thread.
        batches = iter(DataLoader(_Indices(), batch_sampler=loader.batch_sampler, collate_fn=list, generator=loader.generator))
        start = list(itertools.islice(batches, 1))
        self._batches: Iterator[Sequence[int]] = itertools.chain(start, batches)
        self._lengths, self._next, self._first, self._keep, self._vocab = lengths, first, first, keep, vocab
        self.steps = len(loader)
        self._read: dict[int, dict[int, Read]] = {}

    def step(self, index: int) -> StepDocuments:
        """The documents of a step: the sampler's next batch."""
        if index != self._next:
            raise ValueError(f"step {index} was asked for, but a loader's batches come in order: the next one is {self._next}")
        self._next += 1
        ids = np.asarray(list(next(self._batches)), np.int64)
        if self._lengths is None:
            found = self._read[index] = {one: document(self._data[one], one, self._vocab) for one in ids.tolist()}
            lengths = np.array([len(found[one][0]) for one in ids.tolist()], np.int64)
        else:
            lengths = np.array([self._lengths[one] for one in ids.tolist()], np.int64)
        for old in [step for step in self._read if step < index - self._keep]:
            del self._read[old]
        return StepDocuments(index, ids, lengths, (index - self._first) / max(1, self.steps))

    def digest(self, step: int) -> bytes:
        """Of all tokens and labels of a step, where all of them are read."""
        digest = hashlib.blake2b(digest_size=8)
        for tokens, labels in self._read.get(step, {}).values():
            digest.update(tokens.tobytes() + labels.tobytes())
        return digest.digest()

    def read(self, index: int) -> Read:
        """(tokens, labels) of an item."""
        found = next((read[index] for read in self._read.values() if index in read), None)
        found = document(self._data[index], index, self._vocab) if found is None else found
        if self._lengths is not None and len(found[0]) != self._lengths[index]:
            raise UserError(f"item {index} of the data set has {len(found[0])} tokens, but lengths says {self._lengths[index]}")
        return found


def check_loader(loader: Any, world: int, lengths: Sequence[int] | None) -> None:
    """UserError unless the loader's batches can be taken as global batches. lengths: of its items, if they are given."""
    if not isinstance(loader, DataLoader):
        raise UserError(f"data is a {type(loader).__name__}; give the DataLoader of the plain loop, or a source with steps (megadcp.data.order)")
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise UserError("the DataLoader has no batch sampler: plans need lengths ahead of time; give a data set with indices, and a batch_size")
    try:
        len(loader)
    except TypeError:
        raise UserError("the DataLoader's batch sampler has no length: give it a __len__, so that all know how many steps a pass has") from None
    items: Any = loader.dataset
    if lengths is not None and len(lengths) != len(items):
        raise UserError(f"Options.lengths has {len(lengths)} numbers for a data set of {len(items)} items; give one for each")
    if world > 1 and isinstance(loader.sampler, DistributedSampler) and loader.sampler.num_replicas > 1:
        raise UserError(
            f"the DataLoader's DistributedSampler divides documents among {loader.sampler.num_replicas} ranks; plans do that: give every rank "
            "the whole global batch, with an ordinary sampler that is seeded alike everywhere"
        )
