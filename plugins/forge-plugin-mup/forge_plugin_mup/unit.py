"""u-muP: sizes of every tensor are 1 at the start, so that no base is needed (Blake et al. 2024, arXiv 2407.17465).

Initial values are N(0, 1) there, and factors are in the forward pass. Factors of one path multiply, and initial values
and rates absorb them here, as they do for `mup`. A path's contribution relative to the stream, which
the paper keeps at size 1 by dividing both at every addition (its appendix G), is then a factor on the path alone, since
norms take away what all of the stream has been multiplied by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import evolve

from forge_core import ForgeError, JobError, Problem
from forge_core.contracts.errors import listed
from forge_core.contracts.model import Fill, Initialises, Model
from forge_core.contracts.optimizer import NamedParameters
from forge_plugin_mup.absorbed import NamesScoreWeights
from forge_plugin_mup.initial_values import ScaledFill
from forge_plugin_mup.mup import LAYERS
from forge_plugin_mup.shapes import Comparison, Place, sizes_of
from forge_plugin_mup.tables import initial

WHERE = "plugins.mup.parametrization"


@runtime_checkable
class NamesUnitScales(Protocol):
    """A model whose residual blocks can be given the size of its embedding."""

    def unit_scales(self, seq_len: int) -> Mapping[str, float]:
        """Returns by parameter, as a `stream_writers` has them, the factor by which its input has a size of 1.

        At the start, where inputs of the part have that size, and so have what its other matrices compute.
        """
        ...


def unit_scaled(model: Model, seq_len: int) -> Comparison:
    """Returns the parameters relative to a model of width 1 and depth 1, with the factors that they absorb.

    Raises:
        JobError: a part of the model does not state the size of what it computes, or its head is its embedding.
    """
    problems = list(_problems(model))
    if problems:
        raise JobError(problems)
    scales: Any = model
    try:
        absorbed = dict(scales.unit_scales(seq_len))
    except ForgeError as error:
        raise JobError([Problem(WHERE, f'"u_mup": {error}')]) from error
    depth = len(model.layers)
    # Paths of one kind add as much as the embedding, together
    absorbed = {name: factor / math.sqrt(depth) for name, factor in absorbed.items()}
    for names, width, factor in scales.score_weights() if isinstance(model, NamesScoreWeights) else ():
        absorbed |= _of_scores(names, width, factor)
    # Sizes of 1 in place of a base's: ratios of both are the sizes themselves
    places = {item.name: _place(item.name, item, absorbed) for item in NamedParameters.of(model)}
    return Comparison(places=places, depth=depth, twins={})


def _problems(model: Model) -> Iterator[Problem]:
    if not isinstance(model, NamesUnitScales):
        message = f"{type(model).__name__} does not state the size of what its parts compute, by `unit_scales`"
        yield Problem(WHERE, f'"u_mup": {message}; take "complete_p"')
    if model.tied_parameters():
        message = f"{listed(list(model.tied_parameters()))}: u-muP has other rules for embedding and head"
        yield Problem(WHERE, f'"u_mup": {message}; untie them')
    for name, module in model.named_modules():
        own = [key for key, each in module.named_parameters(recurse=False) if each.ndim > 1]
        if own and not isinstance(module, Initialises):
            message = f"{type(module).__name__} draws {name}.{own[0]} by reset_parameters, which cannot be scaled"
            yield Problem(WHERE, f'"u_mup": {message}; implement init_parameter(name, fill)')


def _of_scores(names: Sequence[str], width: int, factor: float) -> Mapping[str, float]:
    """Scores are divided by the width of a head, whose root most attention divides by."""
    ratio = 1 / (factor * width)
    if abs(ratio - 1) < 1e-9:
        return {}
    if not names:
        message = f"scores are multiplied by {factor:.4g} after a norm of queries without a plain gain"
        raise JobError([Problem(WHERE, f'"u_mup": {message}; set model.attention.scale = {1 / width:g}')])
    return dict.fromkeys(names, ratio)


def _place(name: str, item: Any, absorbed: Mapping[str, float]) -> Place:
    outputs, inputs = sizes_of(item.role, item.parameter.shape)
    place = Place(item.role, outputs, inputs, 1, 1, in_block=name.startswith(f"{LAYERS}."))
    return evolve(place, absorbed=absorbed.get(name, 1.0))


def unit_initial_values(model: Model, places: Mapping[str, Place]) -> None:
    """Make modules draw matrices and embeddings from N(0, f²), f their factors, and vectors as before, times f."""
    by_module: dict[str, dict[str, float]] = {}
    for name, place in places.items():
        holder, _, key = name.rpartition(".")
        by_module.setdefault(holder, {})[key] = initial(place)
    # Of the whole model: ranks of a pipeline keep their part of it later
    for holder, factors in by_module.items():
        module: Any = model.get_submodule(holder)
        matrices = {key for key in factors if getattr(module, key).ndim > 1}
        if any(key in matrices or factor != 1 for key, factor in factors.items()):
            module.init_parameter = _Drawn(module.init_parameter, factors, matrices)


class _Drawn:
    """`init_parameter` of a module, on the instance, as stages exchange the class."""

    def __init__(self, own: Any, factors: Mapping[str, float], matrices: set[str]) -> None:
        self.own, self.factors, self.matrices = own, factors, matrices

    def __call__(self, name: str, fill: Fill) -> None:
        if name in self.matrices:
            fill.normal(self.factors[name])
        else:
            self.own(name, ScaledFill(fill, self.factors[name]))
