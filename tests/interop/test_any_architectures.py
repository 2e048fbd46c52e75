"""Every causal language model of transformers that can be made small: the gradients of its plain loop, or one line that says why not."""

from __future__ import annotations

import contextlib
import warnings

import any_helpers as tiny
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megadcp.config.check import UserError
from megadcp.interop.any_model import Steps

VOCAB = 64
MOST_PARAMETERS = 3_000_000
# Whatever a config calls them.
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, n_embd=32, d_model=32, word_embed_proj_dim=32, embedding_size=32, intermediate_size=48, ffn_dim=48, n_inner=48,
    decoder_ffn_dim=48, ffn_hidden_size=48, num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2, decoder_layers=2, num_attention_heads=4,
    n_head=4, n_heads=4, num_heads=4, decoder_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, n_positions=64,
    n_ctx=64, max_seq_len=64, sliding_window=256, rotary_dim=4, rotary_pct=1.0, num_experts=4, num_local_experts=4, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, n_shared_experts=1, n_group=1, topk_group=1,
    first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, num_global_layers=1,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
DOCUMENTS = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 22, 1, 12)]
NEEDS_MORE = {"xmod"}  # a language, named before its forward


def small(kind: str, name: str) -> nn.Module | None:
    """With random weights and nothing random in its forward; None where these sizes don't go together, or are not all that there is."""
    import transformers
    from transformers import CONFIG_MAPPING

    with contextlib.suppress(Exception):
        config_class = CONFIG_MAPPING[kind]
        usual = vars(config_class())
        sizes = {key: value for key, value in SIZES.items() if key in usual and (usual[key] is not None or value is None)}
        sizes |= {key: 0.0 for key, value in usual.items() if isinstance(value, float) and ("drop" in key or "jitter" in key)}
        sizes |= {"is_decoder": True} if "is_decoder" in usual else {}
        model_class = getattr(transformers, name)
        with torch.device("meta"):
            count = sum(each.numel() for each in model_class(config_class(**sizes)).parameters())
        if count > MOST_PARAMETERS:
            return None
        model = model_class(config_class(**sizes)).train()
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for each in model.parameters():
                if each.dim() > 1 or not each.any():
                    each.normal_(0.0, 0.15, generator=random)
        return model
    return None


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def by_loop(model: nn.Module) -> dict[str, Tensor]:
    targets = sum(len(one) - 1 for one in DOCUMENTS)
    for one in DOCUMENTS:
        if len(one) > 1:
            logits = model(input_ids=one[None], use_cache=False).logits[0]
            (F.cross_entropy(logits[:-1].float(), one[1:], reduction="sum") / targets).backward()
    return gradients(model)


def planned(model: nn.Module) -> dict[str, Tensor]:
    with Steps(model, DataLoader(DOCUMENTS, len(DOCUMENTS), collate_fn=list), tiny.OPTIONS) as steps:
        for step in steps:
            for microbatch in step:
                model(**microbatch).loss.backward()
            step.finish()
    return gradients(model)


def error(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    """Largest relative to each parameter's largest gradient (not below a thousandth of the model's largest)."""
    if found.keys() != true.keys():
        return float("inf")
    largest = max(float(each.abs().max()) for each in true.values())
    return max(float((found[key] - true[key]).abs().max() / max(float(true[key].abs().max()), 1e-3 * largest)) for key in true)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_causal_language_models() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS

    right, refused, wrong = [], [], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, name in sorted(KINDS.items()):
            model = small(kind, name) if kind not in NEEDS_MORE else None
            if model is None:
                continue
            try:
                true = by_loop(model)
            except Exception:  # a model that its own loop doesn't run with these sizes tells nothing
                true = {}
            try:
                found = planned(model)
            except UserError as problem:
                refused.append(kind)
                if "\n" in str(problem):
                    wrong[kind] = f"more than a line: {problem}"
                continue
            except Exception as problem:
                if true:
                    wrong[kind] = f"{type(problem).__name__}: {problem}"
                continue
            if true and error(found, true) > 5e-5:
                wrong[kind] = f"{error(found, true):.2g} apart"
            elif true:
                right.append(kind)
    print(f"{len(right)} right: {', '.join(right)}; {len(refused)} refused: {', '.join(refused)}")
    assert not wrong
    assert {"llama", "gpt2", "qwen2", "qwen3", "mixtral"} <= set(right)
    assert {"mamba", "gemma2", "gpt_oss"} <= set(refused)
    assert len(right) > 50
