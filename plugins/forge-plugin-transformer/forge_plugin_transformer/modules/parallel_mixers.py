"""The module of `parallel`. Shapes: B sequences, S positions, D model width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from forge_kit.nn.taps import TapPoint, tap_points
from forge_plugin_transformer.modules import parts
from forge_plugin_transformer.modules.cache import LayerCaches

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Role


class ParallelMixers(nn.Module):
    """Σ scale x mixer(input_scale x), over mixers of positions.

    See `forge_plugin_transformer.kinds.AttentionComponent` for the contract.
    """

    def __init__(
        self, mixers: Mapping[str, nn.Module], *, scales: Mapping[str, float], input_scales: Mapping[str, float]
    ) -> None:
        """Set up the mixers.

        Args:
            mixers: by name.
            scales: factors on outputs by that name; without one, 1.
            input_scales: factors on inputs, likewise.
        """
        super().__init__()
        self.mixers = nn.ModuleDict(mixers)
        self.scales, self.input_scales = dict(scales), dict(input_scales)

    def forward(self, x: Tensor, batch: Batch, cache: LayerCaches | None = None) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        total: Tensor | None = None
        for name, mixer in self.mixers.items():
            own = mixer(_scaled(x, self.input_scales.get(name, 1.0)), batch, *([] if cache is None else [cache[name]]))
            own = _scaled(own, self.scales.get(name, 1.0))
            total = own if total is None else total + own
        assert total is not None
        return total

    def new_cache(self, batch_size: int, length: int) -> LayerCaches:
        """Returns the caches of all mixers, by name."""
        mixers: dict[str, Any] = dict(self.mixers.items())
        return LayerCaches({name: mixer.new_cache(batch_size, length) for name, mixer in mixers.items()})

    def prepare(self, batch: Batch) -> Batch:
        """Adds the entries that the mixers need."""
        for mixer in self.mixers.values():
            batch = parts.prepare(mixer, batch)
        return batch

    def prepare_decode(self, batch: Batch, cache: LayerCaches) -> Batch:
        """Adds the entries that the mixers need beside their caches."""
        for name, mixer in self.mixers.items():
            batch = parts.prepare_decode(mixer, batch, cache[name])
        return batch

    def flops(self, seq_len: int) -> float:
        """Returns the sum over the mixers."""
        return sum(parts.flops(mixer, seq_len) for mixer in self.mixers.values())

    def parameter_roles(self) -> Mapping[str, Role]:
        """Returns the roles that the mixers give."""
        roles: dict[str, Role] = {}
        for name, mixer in self._named():
            roles |= parts.roles(name, mixer)
        return roles

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """Returns the plans of the mixers, each of which takes part in the ranks' exchange by itself."""
        plan: dict[str, Any] = {}
        for name, mixer in self._named():
            plan |= parts.tensor_parallel_plan(name, mixer)
        return plan

    def sequence_mixers(self) -> Mapping[str, int]:
        """Names those of all mixers."""
        return dict(chain.from_iterable(parts.sequence_mixers(*named).items() for named in self._named()))

    def float8_exempt(self) -> Sequence[str]:
        """Names what the mixers exempt."""
        return list(chain.from_iterable(parts.float8_exempt(*named) for named in self._named()))

    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Returns the choices of all mixers."""
        return list(chain.from_iterable(parts.backend_choices(mixer, seq_len) for mixer in self.mixers.values()))

    def tap_points(self) -> Mapping[str, TapPoint]:
        """The points of all mixers; a name that several have gets the name of the mixer before it: `near_z`."""
        own = {key: tap_points(mixer, f"mixers.{key}") for key, mixer in self.mixers.items()}
        counts = Counter(chain.from_iterable(own.values()))
        return {
            f"{key}_{name}" if counts[name] > 1 else name: point
            for key, points in own.items()
            for name, point in points.items()
        }

    def _named(self) -> Sequence[tuple[str, nn.Module]]:
        return [(f"mixers.{name}", mixer) for name, mixer in self.mixers.items()]

    def extra_repr(self) -> str:
        return f"scales={self.scales}, input_scales={self.input_scales}"


def _scaled(x: Tensor, factor: float) -> Tensor:
    # No product with 1, which would cost a pass over x
    return x if factor == 1 else x * factor
