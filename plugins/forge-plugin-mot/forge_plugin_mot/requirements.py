"""Requirements of fusion `mot` on the language model: of its component where that is known, and of what it builds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.contracts.components import RouterComponent
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_transformer import GroupedQueryAttention, Transformer

if TYPE_CHECKING:
    from forge_core.contracts.components import ModelComponent
    from forge_core.contracts.model import Model

ATTENTION = ("q", "k", "v", "o", "q_norm", "k_norm", "rotary", "sinks", "core", "qkv", "mixed")
"""Children of attention: the weights of others would not be untied."""


def component_problems(language: ModelComponent, parts: Collection[str], *, norm_after: bool) -> Iterator[Problem]:
    """Yields why `parts` of the layers of a `transformer` cannot have weights for each modality.

    Paths are relative to the fusion's table. `norm_after`: whether layers shall have their norms after their parts.
    """
    if not isinstance(language, Transformer):
        return  # known once it is built
    if norm_after and language.norm_placement == "shared":
        yield _shared_norm()
    elif norm_after and language.norm_placement != "pre":
        yield _norms_after()
    if language.mtp is not None:
        yield _predictions()
    if language.canon is not None and {"attention", "ffn"} & {*parts}:
        yield _canon()
    others = (type(a).__name__ for a in language.attention.of_layers() if not isinstance(a, GroupedQueryAttention))
    if "attention" in parts and (kind := next(others, None)):
        yield _attention(kind)
    for name in ("attention", "ffn"):
        part = getattr(language, name)
        if absent := [layer for layer in range(language.layers) if part.left_out(layer)]:
            message = f"layer {absent[0]} of the language model has no {name}, for which modalities could have weights"
            yield Problem("", f'{message}; take layers of two parts, or type = "joint"')
    # By type of its fields, so that every feed-forward part with a router is found, also of other plugins
    routed = (
        type(ffn).__name__
        for ffn in language.ffn.of_layers()
        if any(isinstance(getattr(ffn, f.name), RouterComponent) for f in attrs.fields(type(ffn)))
    )
    if "ffn" in parts and (kind := next(routed, None)):
        yield _experts(kind)


def check_layers(model: Model, parts: Collection[str], *, norm_after: bool) -> None:
    """Raises a JobError unless `parts` of all layers can have weights for each modality."""
    if problems := list(_model_problems(model, parts, norm_after)):
        raise JobError(problem.below("model.fusion") for problem in problems)


def _model_problems(model: Model, parts: Collection[str], norm_after: bool) -> Iterator[Problem]:
    """Yields problems; only the first of equal layers."""
    from forge_plugin_transformer.modules.block import Block

    if getattr(model, "mtp", None) is not None:
        yield _predictions()
    if "norm" in parts and getattr(model, "norm", None) is None:
        message = f"{type(model).__name__} has no module `norm` behind its layers, which would be untied"
        yield Problem("untie", f'{message}; leave "norm" out')
    for name, layer in model.layers.items():
        if not isinstance(layer, Block):
            message = f"layers.{name} of the language model is a {type(layer).__name__}, no Block of"
            hint = 'take model.language.type = "transformer", or another fusion'
            yield Problem("", f"{message} forge-plugin-transformer, whose parts could be untied; {hint}")
            return
        if problem := next(_layer_problems(layer, parts, norm_after), None):
            yield problem
            return


def _layer_problems(layer: Any, parts: Collection[str], norm_after: bool) -> Iterator[Problem]:
    from forge_plugin_transformer.modules.attention import GroupedAttention

    # By parameters, as an `nn.Identity` stands for a norm that is not there
    if norm_after and [*layer.attention_post_norm.parameters(), *layer.ffn_post_norm.parameters()]:
        yield _norms_after()
    if norm_after and layer.shared_norm:
        yield _shared_norm()
    attention, ffn = layer.attention, layer.ffn
    if {"attention", "ffn"} & {*parts} and (hasattr(attention, "canon") or hasattr(ffn, "new_cache")):
        yield _canon()
    others = [key for key, _ in attention.named_children() if key not in ATTENTION]
    if "attention" in parts and (others or not isinstance(attention, GroupedAttention)):
        yield _attention(type(attention).__name__)
    if "ffn" in parts and getattr(ffn, "expert_stacks", list)():
        yield _experts(type(ffn).__name__)


def _canon() -> Problem:
    message = "model.language.canon mixes positions before a part, which would see the positions of its modality only"
    return Problem("", f'{message}; leave that table out, or take type = "joint"')


def _predictions() -> Problem:
    message = "model.language.mtp predicts further tokens by weights for text only"
    return Problem("", f'{message}; leave that table out, or take type = "joint"')


def _norms_after() -> Problem:
    message = '"after" moves the norms before the parts of a layer, and the language model has others after them'
    return Problem("norm", f'{message}; take norm = "before", or model.language.norm_placement = "pre"')


def _shared_norm() -> Problem:
    message = '"after" moves the norms before the parts of a layer, and the language model has one norm for both'
    return Problem("norm", f'{message}; take norm = "before", or model.language.norm_placement = "pre"')


def _attention(kind: str) -> Problem:
    message = f"{kind}, the attention of the language model, has no projections that could be told apart by modality"
    return Problem("untie", f'{message}; take model.language.attention.type = "gqa", or leave "attention" out')


def _experts(kind: str) -> Problem:
    message = f"the router of {kind} would count positions of other modalities, which its experts do not compute"
    return Problem("untie", f'{message}; leave "ffn" out, and give modalities experts by a router such as "moma"')
