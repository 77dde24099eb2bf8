"""The components `pattern` of the kinds `attention` and `ffn`: another part in each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import min_len

from forge_core.contracts.errors import JobError, Problem, did_you_mean
from forge_plugin_transformer.kinds import AttentionComponent, FFNComponent, InitStd

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job


class Pattern:
    """What patterns of attention and of feed-forward parts have in common."""

    layers: tuple[str, ...]
    kinds: Mapping[str, Any]
    kind: str

    def of_layers(self) -> Iterable[Any]:
        """Yields the components of all kinds, each once, however many layers have it."""
        for kind in self.kinds.values():
            yield from kind.of_layers()

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that every listed name has a table, and that a layer has every table."""
        for name in dict.fromkeys(self.layers):
            if name not in self.kinds:
                message = f"there is no [model.{self.kind}.kinds.{name}]{did_you_mean(name, list(self.kinds))}"
                yield Problem("layers", f"{message}; there are {', '.join(self.kinds)}")
        for name in self.kinds:
            if name not in self.layers:
                yield Problem(f"kinds.{name}", "no layer has it; name it in `layers`, or leave the table out")

    def depth_problems(self, layers: int) -> Iterable[Problem]:
        """Checks that no listed name is beyond the last layer, and every kind by itself."""
        if len(self.layers) > layers:
            message = f"names the {self.kind} of {len(self.layers)} layers, and the model has {layers}"
            yield Problem("layers", f"{message}; list as many or fewer, which are repeated")
        for name, kind in self.kinds.items():
            yield from (problem.below(f"kinds.{name}") for problem in kind.depth_problems(layers))

    def left_out(self, layer: int) -> bool:
        """Returns whether the kind of this layer is without the part."""
        kind = self.kinds.get(self.name_of(layer))  # a name without a table is a problem of its own
        return kind is not None and kind.left_out(layer)

    def name_of(self, layer: int) -> str:
        """Returns the name of a layer's kind: by its number modulo the length of `layers`."""
        return self.layers[layer % len(self.layers)]

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns the part of layer `context.layer`.

        Raises:
            JobError: the kind cannot be built; the problems name its table.
        """
        name = self.name_of(context.layer or 0)
        try:
            return context.build(self.kinds[name], dim=dim, init=init)
        except JobError as error:  # such as a kernel that cannot run on the device, found without the kind's name
            raise type(error)(_below_kind(problem, self.kind, name) for problem in error.problems) from error


@frozen(kw_only=True)
class AttentionPattern(Pattern, AttentionComponent):
    """Attention that differs between layers: each kind has its own table, and their order repeats.

    For layers with and without a window (Gemma 2 and 3, OLMo 3, gpt-oss), with other encodings of positions or without
    one, attention of another type, or none.
    """

    layers: tuple[str, ...] = field(validator=min_len(1))
    """Names in `kinds`, one for each layer: `["window", "window", "full"]` is repeated until all layers have one, and
    into the modules of multi-token prediction. At most as many as the model has layers."""
    kinds: Mapping[str, AttentionComponent] = field(validator=min_len(1))
    """`[model.attention.kinds.NAME]`: an attention of any `type`, with a name for `layers`."""

    def width_problems(self, dim: int) -> Iterable[Problem]:
        """Yields the problems of every kind, with paths below its table."""
        for name, kind in self.kinds.items():
            yield from (problem.below(f"kinds.{name}") for problem in kind.width_problems(dim))

    def of_layer(self, layer: int) -> AttentionComponent:
        """Returns the component of a layer's kind."""
        kind = self.kinds.get(self.layers[layer % len(self.layers)])  # a name without a table is a problem of its own
        return self if kind is None else kind.of_layer(layer)


@frozen(kw_only=True)
class FFNPattern(Pattern, FFNComponent):
    """A feed-forward part that differs between layers: each kind has its own table, and their order repeats.

    For dense layers and layers with experts in any order, and layers without this part (Nemotron-H).
    """

    layers: tuple[str, ...] = field(validator=min_len(1))
    """Names in `kinds`, one for each layer: `["dense", "moe"]` is repeated until all layers have one, and into the
    modules of multi-token prediction. At most as many as the model has layers."""
    kinds: Mapping[str, FFNComponent] = field(validator=min_len(1))
    """`[model.ffn.kinds.NAME]`: a feed-forward part of any `type`, with a name for `layers`."""

    def normalises_input(self, layer: int) -> bool:
        """Returns what the kind of the layer does."""
        kind = self.kinds.get(self.name_of(layer))  # a name without a table is a problem of its own
        return kind is not None and kind.normalises_input(layer)


def _below_kind(problem: Problem, part: str, name: str) -> Problem:
    """The problem of an attention or a feed-forward part, as one of the kind of this name."""
    before, found, key = problem.path.partition(f"{part}.")
    path = f"{before}{found}kinds.{name}.{key}" if found else problem.path
    return Problem(path, problem.message, problem.origin)
