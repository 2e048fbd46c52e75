"""What users do with models that are not ours beyond the plain case: right gradients, or one clear error."""

from __future__ import annotations

import copy
import random
from typing import Any

import any_helpers as tiny
import pytest
import torch
import torch.nn.functional as F
from ranks import RankFailed, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from megadcp.config.check import UserError
from megadcp.config.schema import ModelConfig, PlanConfig
from megadcp.interop.any_model import Options, Steps

VOCAB = 64
SIZES = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, pad_token_id=None,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
DOCUMENTS = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 22, 5, 12)]
Gradients = dict[str, Tensor]


def initialized(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for each in model.parameters():
        if each.dim() > 1:
            nn.init.normal_(each, std=0.3)
    return model


def made(name: str, **fields: Any) -> nn.Module:
    import transformers

    return initialized(getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES | fields)))


def gradients(model: nn.Module) -> Gradients:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def by_loop(model: nn.Module, data: list[Tensor] = DOCUMENTS) -> Gradients:
    """Document by document, with the model's own attention."""
    model.zero_grad()
    targets = sum(len(one) - 1 for one in data)
    for one in data:
        logits = model(input_ids=one[None], use_cache=False).logits[0]
        (F.cross_entropy(logits[:-1].float(), one[1:], reduction="sum") / targets).backward()
    return gradients(model)


def planned(model: nn.Module, data: Any = DOCUMENTS, options: Options = tiny.OPTIONS, run: Any = lambda model, one: model(**one).loss) -> Gradients:
    with Steps(model, DataLoader(data, len(data), collate_fn=list), options) as steps:
        for step in steps:
            model.zero_grad()
            for microbatch in step:
                run(model, microbatch).backward()
            step.finish()
    return gradients(model)


def apart(found: Gradients, true: Gradients) -> float:
    """Largest difference relative to each parameter's largest gradient."""
    assert found.keys() == true.keys()
    return max(float((found[name] - true[name]).abs().max() / true[name].abs().max().clamp(min=1e-3)) for name in true)


def refusal(model: nn.Module, data: Any = DOCUMENTS, options: Options = tiny.OPTIONS, **more: Any) -> str:
    with pytest.raises(UserError) as raised:
        planned(model, data, options, **more)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# ------------------------------------------------------------------------------------------------- models that are refused
DYNAMIC = {
    "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA3 = dict(head_dim=8, max_position_embeddings=8, sliding_window=256, layer_types=["full_attention", "sliding_attention"])
LLAMA4 = dict(num_local_experts=2, intermediate_size_mlp=24, head_dim=8, layer_types=["full_attention"] * 2, no_rope_layers=[0, 0], floor_scale=4)
DECODER = dict(is_decoder=True, pad_token_id=1, type_vocab_size=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("Roberta", DECODER, "counts positions from 2"),
        ("Doge", {}, "makes an attention mask of its own"),
        ("OPT", dict(ffn_dim=24, word_embed_proj_dim=16), "config.dropout=0.1"),
        ("Mixtral", dict(num_local_experts=4, router_jitter_noise=0.2), "config.router_jitter_noise=0.2"),
    ],
)
def test_models_whose_tokens_depend_on_more_are_refused(name: str, fields: dict, expected: str) -> None:
    assert expected in refusal(made(name, **fields))


def test_what_composite_configs_hide_is_found() -> None:
    import transformers as hf

    gemma = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZES, **GEMMA3, rope_parameters=DYNAMIC))
    assert "rope_type=dynamic" in refusal(initialized(gemma))
    llama = hf.Llama4ForCausalLM(hf.Llama4TextConfig(**SIZES, **LLAMA4))
    assert "attn_temperature_tuning=True" in refusal(initialized(llama))
    fields = dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, sliding_window=256, num_kv_shared_layers=0)
    mixed = hf.Gemma4TextConfig(**SIZES, **fields, layer_types=["sliding_attention", "full_attention"])
    assert "Options(shape=" in refusal(hf.Gemma4ForCausalLM(mixed))


def test_other_losses_and_wrappers_are_refused() -> None:
    import transformers as hf

    tagger = hf.LlamaForTokenClassification(hf.LlamaConfig(**SIZES, num_labels=5, classifier_dropout=0.0))
    assert "ForTokenClassification" in refusal(tagger)
    wrapped = type("PeftModelForCausalLM", (type("PeftModel", (nn.Module,), {}),), {})()
    assert "base_model.model" in refusal(wrapped)
    sparse = made("Llama")
    sparse.model.embed_tokens.sparse = True
    assert "sparse=False" in refusal(sparse)


@pytest.mark.parametrize("module", [nn.Dropout1d(0.1), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1)], ids=lambda one: type(one).__name__)
def test_any_kind_of_dropout_is_found(module: nn.Module) -> None:
    model = made("Llama")
    model.model.more = module
    assert "drops 0.1 of its inputs" in refusal(model)


class OwnAttention(nn.Module):
    """A plain model in which only some layers use the attention that they are given."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.used = used
        self.words, self.qkv, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 48), nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention: Any) -> Tensor:
        x = self.words(input_ids)
        for layer in range(2):
            q, k, v = self.qkv(x).view(len(x), 3, 4, 4).unbind(1)
            own = F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, k, v)), is_causal=True).transpose(0, 1)
            x = x + (attention(q, k, v) if layer < self.used else own).flatten(1)
        return self.head(x)


TWO_LAYERS = Options(
    shape=ModelConfig(layers=2, hidden=16, heads=4, kv_heads=4, head_dim=4, ffn=64, vocab=VOCAB), hardware=tiny.HARDWARE, plan=PlanConfig(ahead=0)
)


@pytest.mark.parametrize("used", [0, 1])
def test_a_plain_model_that_keeps_some_attention_of_its_own_is_found(used: int) -> None:
    said = refusal(OwnAttention(used), options=TWO_LAYERS, run=lambda model, one: one.loss(model(**one)))
    assert f"{used} times for 2 layers" in said


# --------------------------------------------------------------------------------------------------- data that is refused
@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (dict(input_ids=[3, 4, 5], labels=[-1, 4, 5]), "label -1; labels are ids from 0 to 63, or -100"),
        (dict(input_ids=[3, 4, 64]), "token 64, but the model's vocabulary has ids 0 to 63"),
        (dict(input_ids=[3, -4]), "token -4"),
        (dict(input_ids=[3, 4], position_ids=[0, 0]), "has position_ids, which is not used"),
        (dict(input_ids=[3, 4], token_type_ids=[0, 1]), "token_type_ids other than 0"),
    ],
)
def test_items_that_would_be_misread_are_refused(item: dict, expected: str) -> None:
    assert expected in refusal(made("Llama"), [item] * 4)


def test_options_that_do_not_fit_the_loader_are_refused() -> None:
    assert "2 numbers for a data set of 4 items" in refusal(made("Llama"), options=Options(lengths=[1, 2]))
    assert "of a document source" in refusal(made("Llama"), options=Options(first_step=2))

    class NoLength:
        def __iter__(self):
            return iter([[0, 1]])

    with pytest.raises(UserError, match="give it a __len__"):
        Steps(made("Llama"), DataLoader(DOCUMENTS, batch_sampler=NoLength(), collate_fn=list), tiny.OPTIONS)


def test_a_copy_made_meanwhile_is_told_apart() -> None:
    model = made("Llama")
    with Steps(model, DataLoader(DOCUMENTS, 4, collate_fn=list), tiny.OPTIONS):
        assert "make copies before Steps" in refusal(copy.deepcopy(model))
    assert apart(planned(model), by_loop(model)) < 2e-5


def test_a_step_that_is_not_finished_ends_the_loop() -> None:
    model = made("Llama")
    with Steps(model, DataLoader(DOCUMENTS, 2, collate_fn=list), tiny.OPTIONS) as steps:
        passes = iter(steps)
        for microbatch in next(passes):
            model(**microbatch).loss.backward()
        with pytest.raises(UserError, match="step 0 was not finished"):
            next(passes)


# ----------------------------------------------------------------------------------------------------------- what is right
def test_autocast_is_the_plain_loops() -> None:
    model = made("Llama")
    with torch.autocast("cpu", torch.bfloat16):
        found, true = planned(model), by_loop(model)
    assert apart(found, true) < 0.03
    with pytest.raises(UserError, match="one format for all"):
        planned(model.half(), run=lambda model, one: one.attention(torch.zeros(46, 4, 4), *[torch.zeros(46, 2, 4).half()] * 2))


def test_values_narrower_than_keys_are_filled_up() -> None:
    """Latent attention of DeepSeek: keys of 12, values of 8."""
    latent = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4)
    experts = dict(first_k_dense_replace=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=8)
    model = made("DeepseekV3", **latent, **experts)
    assert apart(planned(model), by_loop(model)) < 2e-5


def test_a_forward_before_the_one_that_counts() -> None:
    def run(model: nn.Module, microbatch: Any) -> Tensor:
        with torch.no_grad():
            model(**microbatch)
        return model(**microbatch).loss

    model = made("Llama")
    assert apart(planned(model, run=run), by_loop(model)) < 2e-5


def test_a_loss_of_ones_own() -> None:
    def run(model: nn.Module, microbatch: Any) -> Tensor:
        logits = model(**microbatch).logits[0]
        return F.cross_entropy(logits, microbatch.packed.labels, reduction="sum", ignore_index=-100) / microbatch.step.targets

    model = made("Llama")
    assert apart(planned(model, run=run), by_loop(model)) < 2e-5


# -------------------------------------------------------------------------------------------------------------- two ranks
LONG = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (300, 280, 310, 305)]


class Anything(Dataset):
    """Another text for whoever asks."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((500,), random.randrange(VOCAB))


class Table(nn.Module):
    """A plain model with a row for each position of its longest document and no more."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(rows, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention: Any) -> Tensor:
        x = self.words(input_ids) + self.places(position_ids)
        for _ in range(2):
            x = x + attention(*self.qkv(x).view(len(x), 3, 4, 4).unbind(1)).flatten(1)
        return self.head(x)


def in_halves(step: Any) -> Any:
    """A plan in which two ranks share every document."""
    from layouts import Case, random_plan

    case = Case(lanes=2, stage_layers=(2,), model=TWO_LAYERS.shape, lengths=tuple(step.lengths.tolist()))
    plans = (random_plan(case, seed, step.step) for seed in range(10**6))
    return next(plan for plan in plans if {one.cp for one in plan.microbatches} == {2})


def on_two_ranks(rank: int, world: int) -> dict[str, float]:
    found = {}
    model = made("Llama")
    model.model.layers[0].requires_grad_(False)
    with Steps(model, DataLoader(LONG, 4, collate_fn=list), tiny.OPTIONS) as steps:
        model.model.layers[0].requires_grad_(True)
        for step in steps:
            for microbatch in step:
                model(**microbatch).loss.backward()
            step.finish()
    found["freed later"] = apart(gradients(model), by_loop(model, LONG))

    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    true = by_loop(made("Llama"))
    for name, policy in (("fsdp", MixedPrecisionPolicy()), ("fsdp in bf16", MixedPrecisionPolicy(torch.bfloat16, torch.float32))):
        model = made("Llama")
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)

        def plain_step(model: nn.Module = model) -> Gradients:
            model.zero_grad()
            model(input_ids=DOCUMENTS[1][None], labels=DOCUMENTS[1][None]).loss.backward()
            return {key: each.full_tensor() for key, each in gradients(model).items()}

        before = plain_step()
        model.zero_grad()
        found[name] = apart({key: each.full_tensor() for key, each in planned(model).items()}, true)
        found[f"{name}, closed"] = apart(plain_step(), before)

    with Steps(Table(33), DataLoader([torch.arange(33)], 1, collate_fn=list), TWO_LAYERS, in_halves) as steps:
        for step in steps:
            for microbatch in step:
                microbatch.loss(steps.model(**microbatch)).backward()
            step.finish()
    return found


def test_on_two_ranks() -> None:
    for found in run_ranks(2, on_two_ranks, timeout_s=120):
        assert found.pop("fsdp in bf16") < 0.15
        assert max(found.values()) < 2e-5, found


def other_texts(rank: int, world: int) -> None:
    random.seed(rank)
    planned(made("Llama"), Anything())


def test_ranks_that_read_other_texts_are_told() -> None:
    with pytest.raises(RankFailed, match="let the data set give everybody the same item"):
        run_ranks(2, other_texts, timeout_s=60)
