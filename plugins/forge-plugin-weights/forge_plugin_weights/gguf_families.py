"""Architectures of GGUF: the model that each is, its further keys, and the order and names of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from attrs import field, frozen

from forge_core.contracts.errors import JobError
from forge_plugin_transformer.huggingface_names import PARTS
from forge_plugin_weights.gguf_files import GgufFile
from forge_plugin_weights.kinds import Config

SILENT = ("general.", "tokenizer.", "quantize.", "split.")
"""Beginnings of keys that do not describe the model; the tokenizer has another reader."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The tensors by which llama.cpp has the position encoding of Phi-3 with long texts."""
GEMMA2_27B, GEMMA3_27B = 46, 62
"""Layers of the models whose scores llama.cpp divides by the width by heads, in place of the width of a head."""


class Keys:
    """The keys of a file's metadata that are still to be read."""

    def __init__(self, file: GgufFile, family: Family) -> None:
        self._path, self._prefix = file.path, f"{family.name}."
        self.left = {name: value for name, value in file.metadata.items() if not name.startswith(SILENT)}

    def take(self, name: str, default: Any = None) -> Any:
        """Returns the value of a key of the architecture, which counts as read; one value for all layers."""
        value = self.left.pop(self._prefix + name, default)
        if isinstance(value, list):
            if not value or any(each != value[0] for each in value):
                raise JobError(f"{self._path}: {self._prefix}{name} = {value}; one value for all layers is read")
            return value[0]
        return value

    def need(self, name: str) -> Any:
        """Returns the value of a key that every file has; raises a `JobError` for one that has not."""
        value = self.take(name)
        if value is None:
            raise JobError(f"{self._path} has no {self._prefix}{name}; the file is damaged, or of another program")
        return value

    def drop(self, name: str, inert: Any) -> None:
        """Forget a key at the value at which it changes nothing; at another, it stays and is refused."""
        if self.left.get(self._prefix + name) == inert:
            del self.left[self._prefix + name]


@frozen
class Known:
    """What a family's own keys are read with."""

    file: GgufFile
    keys: Keys
    config: Config
    """The keys of the configuration that all families have."""


@frozen(kw_only=True)
class Family:
    """An architecture of GGUF."""

    name: str
    model_type: str
    """Of the configuration that an import reads."""
    exported: Sequence[str] = ()
    """Each `model_type` that is written as this one."""
    paired: bool = False
    """Whether the rows of queries and keys are in pairs; see `gguf_files.PairedRows`."""
    modules: Sequence[str] = tuple(PARTS.values())
    """Published modules of a layer, but for experts."""
    experts: str = ""
    """The published module of a layer's experts, which are one stack in GGUF; empty: there are none."""
    matrices: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
    """Of an expert."""
    adds_one: bool = False
    """Whether gains of norms are stored where published files hold them less 1; see `gguf_files.Gains`."""
    other_tensors: Sequence[str] = ()
    """Tensors that are a part of the configuration."""
    further: Callable[[Known], Config] = field(default=lambda known: {}, repr=False)
    """Returns keys of the configuration that not all architectures have."""


def _llama(known: Known) -> Config:
    return {
        "attention_bias": "blk.0.attn_q.bias" in known.file.places,
        "mlp_bias": "blk.0.ffn_gate.bias" in known.file.places,
    }


def _mixtral(known: Known) -> Config:
    """llama.cpp has no window for it, and weights of the chosen experts add up to 1."""
    return {
        "num_local_experts": known.keys.need("expert_count"),
        "num_experts_per_tok": known.keys.need("expert_used_count"),
        "sliding_window": None,
    }


def _qwen3_moe(known: Known) -> Config:
    """All layers have experts there, and weights of the chosen ones add up to 1."""
    return {
        "num_experts": known.keys.need("expert_count"),
        "num_experts_per_tok": known.keys.need("expert_used_count"),
        "moe_intermediate_size": known.keys.need("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(known: Known, largest: int, window: int | None) -> dict[str, Any]:
    """The keys of Gemma 2 and 3. The divisor of scores is no key of GGUF: llama.cpp goes by the number of layers."""
    keys, config = known.keys, known.config
    by_width = config["num_hidden_layers"] == largest
    scalar = config["hidden_size"] // config["num_attention_heads"] if by_width else config["head_dim"]
    sliding = keys.need("attention.sliding_window") if window is None else keys.take("attention.sliding_window", window)
    return {"query_pre_attn_scalar": scalar, "sliding_window": sliding, "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(known: Known) -> Config:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {
        **_gemma(known, GEMMA2_27B, 4096),
        **{key: known.keys.take(key, default) for key, default in caps.items()},
    }


def _gemma3(known: Known) -> Config:
    """The base of layers with a window is fixed in llama.cpp, and so is that every sixth layer has none."""
    known.keys.drop("attention.sliding_window_pattern", 6)
    return {
        **_gemma(known, GEMMA3_27B, None),
        "rope_local_base_freq": known.keys.take("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": known.keys.take("final_logit_softcapping"),
    }


def _phi3(known: Known) -> Config:
    file, keys, config = known.file, known.keys, known.config
    original = keys.take("rope.scaling.original_context_length", config["max_position_embeddings"])
    own = {
        "original_max_position_embeddings": original,
        "partial_rotary_factor": keys.take("rope.dimension_count", config["head_dim"]) / config["head_dim"],
        "sliding_window": keys.take("attention.sliding_window") or None,  # 0 is none
    }
    if LONG_FACTORS not in file.places:
        return own
    scale = config["max_position_embeddings"] / original
    # `Phi3MiniModel.generate_extra_tensors` of the converter, and `Phi3Config`
    expected = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    factor = keys.take("rope.scaling.attn_factor", 1.0)
    if not math.isclose(factor, expected, rel_tol=1e-5):
        message = f"phi3.rope.scaling.attn_factor = {factor}; {expected:.6g} is read, which follows from both lengths"
        raise JobError(f"{file.path}: {message}")
    factors = {"long_factor": LONG_FACTORS, "short_factor": SHORT_FACTORS}
    lists = {key: file.places[name].read().float().tolist() for key, name in factors.items()}
    return {**own, "rope_scaling": {"type": "longrope", **lists}}


GEMMA_MODULES = (
    *(module for module in PARTS.values() if not module.endswith("norm")),
    *(f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")),
    *("self_attn.q_norm", "self_attn.k_norm"),
)
FUSED = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
"""Matrices of a layer of Phi-3."""
FAMILIES: Sequence[Family] = (
    Family(name="llama", model_type="llama", exported=("llama", "mistral"), paired=True, further=_llama),
    Family(
        name="llama",
        model_type="mixtral",
        exported=("mixtral",),
        paired=True,
        modules=(*PARTS.values(), "block_sparse_moe.gate"),
        experts="block_sparse_moe.experts",
        matrices=("w1", "w2", "w3"),
        further=_mixtral,
    ),
    Family(name="qwen2", model_type="qwen2", exported=("qwen2",)),
    Family(name="qwen3", model_type="qwen3", exported=("qwen3",)),
    Family(
        name="qwen3moe",
        model_type="qwen3_moe",
        exported=("qwen3_moe",),
        modules=(*PARTS.values(), "mlp.gate"),
        experts="mlp.experts",
        further=_qwen3_moe,
    ),
    Family(name="gemma", model_type="gemma", adds_one=True),
    Family(name="gemma2", model_type="gemma2", modules=GEMMA_MODULES, adds_one=True, further=_gemma2),
    Family(name="gemma3", model_type="gemma3_text", modules=GEMMA_MODULES, adds_one=True, further=_gemma3),
    Family(
        name="phi3",
        model_type="phi3",
        modules=("input_layernorm", "post_attention_layernorm", *FUSED),
        other_tensors=(LONG_FACTORS, SHORT_FACTORS),
        further=_phi3,
    ),
)


def family_of(file: GgufFile) -> Family:
    """Returns the architecture of a file; raises a `JobError` for one that is not read, or for a file of no model."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise JobError(f"{file.path} is of general.type {kind!r}, and not of a model")
    name = file.metadata.get("general.architecture", "")
    families = [family for family in FAMILIES if family.name == name]
    if not families:
        hint = "take the published folder with config.json and safetensors files"
        known = ", ".join(dict.fromkeys(family.name for family in FAMILIES))
        raise JobError(f"{file.path}: general.architecture = {name!r}; {known} are read; {hint}")
    has_experts = bool(file.metadata.get(f"{name}.expert_count"))
    # Where none has experts, or all have, the key is read or refused with the others
    return next((family for family in families if bool(family.experts) == has_experts), families[0])
