"""The component `parallel`: several mixers of positions side by side in each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import deep_mapping, gt, instance_of, min_len

from forge_core.contracts.components import when_resumed
from forge_core.contracts.errors import JobError, Problem, did_you_mean
from forge_plugin_transformer.kinds import AttentionComponent, InitStd

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

FACTORS = deep_mapping(instance_of(str), gt(0))


@frozen(kw_only=True)
class ParallelAttention(AttentionComponent):
    """Several mixers that read the same input behind one norm, and whose outputs are added (parallel hybrid).

    Attention and Mamba-2 in Falcon-H1 (arXiv 2507.22448), each with a factor on what it reads and one on its output.
    """

    mixers: Mapping[str, AttentionComponent] = field(validator=min_len(2))
    """`[model.attention.mixers.NAME]`: an attention of any `type` but `none`."""
    scales: Mapping[str, float] = field(factory=dict, validator=FACTORS, metadata=when_resumed("flag"))
    """Factors on outputs, by the name of the mixer; 1 where there is none."""
    input_scales: Mapping[str, float] = field(factory=dict, validator=FACTORS, metadata=when_resumed("flag"))
    """Factors on what the mixers read, likewise."""

    def of_layers(self) -> Iterable[AttentionComponent]:
        """Yields the components of all mixers."""
        for mixer in self.mixers.values():
            yield from mixer.of_layers()

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that factors name mixers."""
        for key in ("scales", "input_scales"):
            for name in getattr(self, key):
                if name not in self.mixers:
                    message = f"there is no table mixers.{name} beside it{did_you_mean(name, list(self.mixers))}"
                    yield Problem(f"{key}.{name}", f"{message}; there are {', '.join(self.mixers)}")

    def width_problems(self, dim: int) -> Iterable[Problem]:
        """Yields the problems of every mixer, with paths below its table."""
        for name, mixer in self.mixers.items():
            yield from (problem.below(f"mixers.{name}") for problem in mixer.width_problems(dim))

    def depth_problems(self, layers: int) -> Iterable[Problem]:
        """Checks that a mixer is in every layer, and every mixer by itself."""
        for name, mixer in self.mixers.items():
            if absent := [layer for layer in range(layers) if mixer.left_out(layer)]:
                message = f"layer {absent[0]} is without it"
                yield Problem(f"mixers.{name}", f"{message}; give it an attention, or take a pattern of `parallel`")
            yield from (problem.below(f"mixers.{name}") for problem in mixer.depth_problems(layers))

    def build(self, context: BuildContext, dim: int, init: InitStd) -> nn.Module:
        """Returns a `ParallelMixers`.

        Raises:
            JobError: a mixer cannot be built; the problems name its table.
        """
        from forge_plugin_transformer.modules.parallel_mixers import ParallelMixers

        built = {name: self._built(context, name, dim, init) for name in self.mixers}
        return ParallelMixers(built, scales=self.scales, input_scales=self.input_scales)

    def _built(self, context: BuildContext, name: str, dim: int, init: InitStd) -> nn.Module:
        try:
            return context.at(f"mixers.{name}").build(self.mixers[name], dim=dim, init=init)
        except JobError as error:  # such as a kernel that cannot run on the device, found without the mixer's name
            raise type(error)(_below_mixer(problem, name) for problem in error.problems) from error


def _below_mixer(problem: Problem, name: str) -> Problem:
    """The problem of an attention, as one of the mixer of this name."""
    before, found, key = problem.path.partition("attention.")
    path = f"{before}{found}mixers.{name}.{key}" if found else problem.path
    return Problem(path, problem.message, problem.origin)
