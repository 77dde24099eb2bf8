"""The stage of the component `taps`: hooks on the modules that have a point."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.runtime import ParallelStage
from forge_kit.nn.blocks import blocks_of
from forge_kit.nn.taps import TapPoint
from forge_plugin_taps.pattern import PatternSite
from forge_plugin_taps.recorder import ATTRIBUTE, Recorder
from forge_plugin_taps.selection import editable, matching, sampled_points, with_gradients
from forge_plugin_taps.site import Current, Site

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Model
    from forge_plugin_taps.taps import Taps


class TapsStage(ParallelStage):
    """See `forge_core.contracts.runtime.ParallelStage`."""

    def __init__(self, component: Taps, context: BuildContext) -> None:
        self._component = component
        self._recorder = Recorder(component, context)

    def apply(self, model: Model) -> Model:
        """Put hooks on modules that have a selected point, and note the micro-batch at every way into the model."""
        recorder, component = self._recorder, self._component
        points = sampled_points(model)
        values = set(matching(component.points, list(points)))
        gradients = set(matching(component.gradients, with_gradients(points)))
        blocks = blocks_of(model)
        carried: dict[int, dict[str, Site]] = {id(block): {} for block in blocks}
        edited = set(matching([edit.point for edit in component.edits.values()], editable(points)))
        for name, point in points.items():
            if name not in values | gradients | edited:
                continue
            module = model.get_submodule(point.module)
            if point.side == "pattern":
                recorder.sites[name] = _hang_pattern(module, name, point, recorder)
                continue
            site = recorder.sites[name] = Site(
                name,
                point.axes,
                recorder.current,
                values=name in values,
                gradient=name in gradients,
                copies=point.side == "carry_out",
            )
            if point.side in ("carry_in", "carry_out"):
                carried[id(module)][point.side] = site
            else:
                _hang(module, point, site)
        # After all sites are there, at whose points edits are put
        recorder.add_edits()
        # With a dot, so that layers.1 does not stand for layers.10
        names = {module: f"{name}." for name, module in model.named_modules()}
        for block in blocks:
            own = carried[id(block)]
            edited_here = tuple(recorder.sites[name] for name in edited if points[name].module.startswith(names[block]))
            block.forward = InBlock(
                block.forward, recorder.current, own.get("carry_in"), own.get("carry_out"), edited_here, True
            )
        for method in ("embed", "finish"):
            setattr(model, method, InBlock(getattr(model, method), recorder.current))
        setattr(model, ATTRIBUTE, recorder)
        return model

    def describe(self) -> str:
        """Counts the points of this rank: ranks of a pipeline have other layers."""
        return f"{len(self._recorder.sites)} points on this rank"

    def split(self, batch: Batch) -> Batch:
        """Mark the sampled positions of a micro-batch, of which context parallel has left this rank its part."""
        return self._recorder.mark(batch)


@frozen
class InBlock:
    """A block's forward pass, or `embed` or `finish`, that notes its micro-batch, and the points of its carry."""

    forward: Callable[..., Any]
    current: Current
    before: Site | None = None
    after: Site | None = None
    edited: tuple[Site, ...] = ()
    """Sites inside the block that have edits."""
    is_layer: bool = False
    """Whether it is a block, which may be called with a cache."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The micro-batch is the argument that is a mapping: blocks take it second, `embed` first.
        for value in (*args, *kwargs.values()):
            if isinstance(value, dict):
                self.current.enter(value)
                break
        else:
            self.current.refresh()
        decoding = _is_decoding(args)
        if self.is_layer and self.current.edits:
            self.current.decoding = decoding
        if self.before is not None:
            carry, *others = args
            args = ((self.before.take(carry[0]), *carry[1:]), *others)
        out = self._decoded(args, kwargs) if self.edited and decoding else self.forward(*args, **kwargs)
        if self.after is not None:
            out = (self.after.take(out[0]), *out[1:])
        return out

    def _decoded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's result where a cache holds earlier positions.

        Raises:
            ForgeError: the block computes otherwise then, without passing a point whose edit is on.
        """
        for site in self.edited:
            site.edited = False
        out = self.forward(*args, **kwargs)
        for site in self.edited:
            if not site.edited and any(name in self.current.edits for name, *_ in site.edits):
                message = f"{site.name} is not passed where a cache holds keys and values, so its edit would be lost"
                raise ForgeError(f"{message}; take attn_out of its layer")
        return out


def _is_decoding(args: tuple[Any, ...]) -> bool:
    """Whether a layer was called with a cache: (carry, batch, cache)."""
    return len(args) > 2 and isinstance(args[1], dict) and args[2] is not None


def _hang_pattern(module: nn.Module, name: str, point: TapPoint, recorder: Recorder) -> PatternSite:
    """Let a site see queries and keys of a module that mixes positions."""
    site = PatternSite(name, recorder.current, point.mixing, recorder.position_group)

    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        q, k, _v, batch, *sinks = args
        site.observe(q, k, batch, *sinks)

    module.register_forward_pre_hook(before)
    return site


def _hang(module: nn.Module, point: TapPoint, site: Site) -> None:
    """Let a site see the input or output of a module."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        index = point.index
        return (*args[:index], site.take(args[index]), *args[index + 1 :])

    def after(_: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
        if isinstance(out, Tensor):
            return site.take(out)
        index = point.index
        if site.edits:
            # The choices beside the weights of experts, by which an edit finds those of an expert
            site.current.outputs = out
        return (*out[:index], site.take(out[index]), *out[index + 1 :])

    if point.side == "input":
        module.register_forward_pre_hook(before)
    else:
        module.register_forward_hook(after)
