"""What a model that is not ours must not do, found by the names of its classes and settings before anything runs.

Each rule is a fact about training on packed, sharded documents: a token may depend on others through attention alone. What has no telltale
name is not found; the call-by-call checks of any_model.py then are all there is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from megadcp.config.check import UserError

STATE = re.compile(
    r"mamba|rwkv|rg_?lru|recurrent|retention|retnet|deltanet|linear_?attention|lightning_?attention|hyena|token_?shift|short_?conv", re.I
)
BIAS = re.compile(r"alibi|relativeattentionbias|relativepositionbias", re.I)
WRAPPERS = {
    "DistributedDataParallel": "it would average gradients in every backward; hand over the model inside, Step.finish sums them",
    "FullyShardedDataParallel": "it reduces gradients in every backward; use torch.distributed.fsdp.fully_shard (FSDP2)",
    "DataParallel": "it splits batches; hand over the model inside",
    "OptimizedModule": "torch.compile of a whole model would compile each microbatch anew; hand over the model inside",
    "PeftModel": "it takes arguments apart; hand over peft_model.base_model.model, which has the same adapters",
}
# Settings of random numbers in training, but not those of heads that a causal language model does not have.
RANDOM = re.compile(r"dropout|pdrop|layerdrop|layer_drop|drop_path|jitter_noise|jitter_eps", re.I)
HEADS = re.compile(r"classif|summary|^cls_|head_dropout", re.I)


def check_model(model: nn.Module) -> None:
    """UserError, one line, for the first thing that makes the result depend on how documents are packed or shared."""
    if name := next((base.__name__ for base in type(model).__mro__ if base.__name__ in WRAPPERS), ""):
        raise UserError(f"the model is wrapped in {name}: {WRAPPERS[name]}")
    kind = getattr(model, "loss_type", None)
    if kind not in (None, "ForCausalLM", "ForConditionalGeneration"):
        raise UserError(f"{type(model).__name__} has another loss than that of the next token ({kind}); give the causal language model")
    for module_name, module in model.named_modules():
        problem = module_problem(module) or _offset(module_name, module)
        if problem:
            raise UserError(f"{module_name or 'the model'} ({type(module).__name__}) {problem}")
    for config in configs_of(model):
        for rule in RULES:
            problem = rule(config)
            if problem:
                raise UserError(f"{type(model).__name__}: {problem}")


def configs_of(model: nn.Module) -> list[Any]:
    """The config of a transformers model, and that of its text where it has a part for that."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return []
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [config] if text is config else [config, text]


def _offset(name: str, module: nn.Module) -> str:
    if isinstance(module, nn.Embedding) and module.padding_idx is not None and name.endswith("position_embeddings"):
        return f"counts positions from {module.padding_idx + 1} and not from 0, as documents in a pack do; use another model"
    return ""


def module_problem(module: nn.Module) -> str:
    """What is wrong with one module, "" for nothing."""
    name = type(module).__name__
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "takes its statistics over all tokens of a microbatch: the result would depend on the packing; use LayerNorm or RMSNorm"
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return "carries state from token to token outside attention, which can't be shared between ranks here; use an attention-only model"
    if isinstance(module, (nn.modules.conv._ConvNd,)) and any(size > 1 for size in module.kernel_size):
        return "mixes neighbouring tokens outside attention, across borders of documents and ranks; use a model without convolutions"
    if STATE.search(name):
        return "carries state from token to token outside attention, which can't be shared between ranks here; use an attention-only model"
    if BIAS.search(name):
        return "biases attention by distance, which no kind of context parallelism here has; use rotary or learned positions"
    if isinstance(module, nn.Embedding) and module.sparse:
        return "has sparse gradients, which are not summed over ranks here; use sparse=False"
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return f"drops {module.p:g} of its inputs: which ones would depend on the plan; set dropout to 0 in the model's config"
    if getattr(module, "is_cross_attention", False):
        return "is cross attention, whose keys are not the microbatch's; use a decoder-only model"
    if getattr(module, "is_causal", True) is False and "attention" in name.lower():
        return "is not causal; use a causal decoder"
    return ""


# ------------------------------------------------------------------------------------------------ rules on transformers' configs
def _encoder(config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "it has cross attention, whose keys are not the microbatch's; use a decoder-only model"
    if getattr(config, "is_causal", True) is False:
        return "config.is_causal=False: attention sees both ways; use a causal decoder"
    return ""


def _layers(config: Any) -> str:
    kinds = set(getattr(config, "layer_types", None) or ())
    other = sorted(kinds - {"full_attention", "sliding_attention", "attention"})
    if other:
        return f"config.layer_types has {', '.join(other)}: only full attention can be shared between ranks here"
    return ""


def _rope(config: Any) -> str:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [rope, *(part for part in rope.values() if isinstance(part, dict))] if isinstance(rope, dict) else []  # one, or one a kind of layer
    kind = next((kind for one in each if (kind := one.get("rope_type", one.get("type"))) in ("dynamic", "longrope")), "")
    if kind:
        return (
            f"rope_type={kind} takes its frequencies from the longest position in a batch: the result would depend on the packing; use llama3 or yarn"
        )
    return ""


def _attention(config: Any) -> str:
    for name in ("attn_logit_softcapping", "attn_logit_softcap"):
        if getattr(config, name, None):
            return f"config.{name}={getattr(config, name):g}: attention with a soft cap on its logits can't be had here; use a model without it"
    if getattr(config, "alibi", False):
        return "config.alibi=True: attention biased by distance can't be had here; use rotary or learned positions"
    if getattr(config, "attn_temperature_tuning", False) and 0 in (getattr(config, "no_rope_layers", None) or ()):
        return "config.attn_temperature_tuning=True counts positions over a whole pack in layers without rotary positions; set it to False"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "config.reorder_and_upcast_attn=True has attention code of its own; set it to False"
    return ""


def _random(config: Any) -> str:
    for name, value in config.to_dict().items() if hasattr(config, "to_dict") else ():
        if RANDOM.search(name) and not HEADS.search(name) and isinstance(value, float) and value > 0:
            return f"config.{name}={value:g}: its random numbers would depend on the plan; set it to 0"
    return ""


def _experts(config: Any) -> str:
    if getattr(config, "expert_capacity", None):
        return f"config.expert_capacity={config.expert_capacity}: which tokens an expert drops would depend on the packing; use dropless routing"
    if getattr(config, "output_router_logits", False):
        return "config.output_router_logits=True adds a loss over all tokens of a microbatch: it would depend on the packing; set it to False"
    return ""


RULES: tuple[Callable[[Any], str], ...] = (_encoder, _layers, _rope, _attention, _random, _experts)


# ------------------------------------------------------------------------------------------------------------- arguments
def check_windows(config: Any, longest: int) -> None:
    """UserError if a window of attention is shorter than the longest document (0: not known yet; each step is checked)."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    windowed = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    if window and windowed and longest > window:
        raise UserError(
            f"config.sliding_window={window}, but documents have up to {longest} tokens: windows can't be shared between ranks here; "
            f"cut documents to {window} tokens, or set sliding_window to None"
        )


def check_arguments(model: nn.Module, names: tuple[str, ...]) -> None:
    """UserError unless the model's forward takes these by name."""
    for one in _forwards(model):
        taken = inspect.signature(one.forward).parameters
        missing = [name for name in names if name not in taken]
        if missing and not (one is model and any(each.kind is each.VAR_KEYWORD for each in taken.values())):
            raise UserError(
                f"{type(one).__name__}.forward takes no {' and no '.join(missing)}: in a pack every document begins at position 0, "
                f"so the model must take {', '.join(names)}"
            )


def _forwards(model: nn.Module) -> Iterator[nn.Module]:
    yield model
    base = getattr(model, "base_model", model)
    if base is not model and isinstance(base, nn.Module):
        yield base
