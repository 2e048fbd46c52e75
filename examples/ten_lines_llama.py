"""A Llama trained by an ordinary loop of transformers (plain_llama.py), and with data-driven plans on all ranks (ten_lines_llama.py)."""

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from megadcp.interop.any_model import Steps

VOCAB = 512


def make_model() -> LlamaForCausalLM:
    """Small, with random weights."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=4096, **sizes))


def make_documents(count: int) -> list[torch.Tensor]:
    """Sequences that count on in steps of 1 to 4: short ones, and a few long ones."""
    torch.manual_seed(1)
    lengths = torch.randn(count).mul(1.2).add(3.5).exp().long().clamp(2, 2000).tolist()
    return [(torch.randint(VOCAB, (1,)) + torch.randint(1, 5, (1,)) * torch.arange(length)) % VOCAB for length in lengths]


def collate(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One padded batch."""
    tokens = pad_sequence(documents, batch_first=True)
    mask = pad_sequence([torch.ones_like(each) for each in documents], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def train(model: LlamaForCausalLM, documents: list[torch.Tensor], batch_size: int = 16) -> list[float]:
    """One pass; the loss of each step."""
    loader = DataLoader(documents, batch_size, shuffle=True, generator=torch.Generator().manual_seed(2), collate_fn=collate)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
    losses = []
    for step in Steps(model, loader):
        optimizer.zero_grad()
        for microbatch in step:
            model(**microbatch).loss.backward()
        loss = step.finish()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    found = train(make_model(), make_documents(160))
    print(" ".join(f"{loss:.4f}" for loss in found))
