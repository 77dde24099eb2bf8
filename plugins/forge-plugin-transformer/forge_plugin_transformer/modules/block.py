"""A layer of the transformer. Shapes: B sequences, S positions, D model width, n residual streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_kit.nn.direct_calls import directly_callable
from forge_kit.nn.modules import cast
from forge_kit.nn.taps import TapPoint, tap_points
from forge_plugin_transformer.modules import parts
from forge_plugin_transformer.modules.altup import HalvedAddition
from forge_plugin_transformer.modules.attention import KVExchange
from forge_plugin_transformer.modules.cache import LayerCaches, NoCache
from forge_plugin_transformer.modules.residual import Addition

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry, Fill

PARTS = (
    *("attention_residual", "attention_norm", "attention", "attention_post_norm"),
    *("ffn_residual", "ffn_norm", "ffn", "ffn_post_norm"),
    *("laurel", "altup", "layer_input"),
)
"""Parts of a block, in the order of its forward pass. A norm that the block does not have is an `nn.Identity`."""


@directly_callable
class LayerScalar(nn.Module):
    """x times a number, which is in checkpoints and is not trained."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.empty(1))

    def init_parameter(self, name: str, fill: Fill) -> None:
        """Raises AssertionError, as there are no parameters to fill."""
        raise AssertionError(f"a layer's scalar has no parameter {name}")

    def init_buffers(self, device: torch.device) -> None:
        """Fills the number with 1, by which it does nothing."""
        self.value.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        """(…) to (…); the number is rounded to the dtype of x."""
        return x * cast(self.value, x.dtype)


class LeftOut(nn.Module):
    """In the place of a part that a block does not have. It is never called."""

    def new_cache(self, batch_size: int, length: int) -> NoCache:
        """Returns a cache of nothing."""
        return NoCache()


@directly_callable
class Block(nn.Module):
    """x + attention(x), then x + ffn(x), each with a norm before it, after it, or both.

    One of the two may be a `LeftOut`: then x is not changed in its place.

    The carry is (x (B, S, D),), or (x (B, S, n, D),) with modules in place of both sums that have n streams.

    Args:
        attention_residual: joins attention to x, see `ResidualComponent`; None: their sum.
        ffn_residual: likewise for the feed-forward part.
        parallel: whether both parts read the same x: x + attention(x) + ffn(x).
        shared_norm: whether `attention_norm` normalises the input of both parts, which are parallel then.
        scale: factor on what each part adds.
        scalar: factor on the stream behind both parts.
        layer_input: adds an input of the layer to the stream before that, see `CarryingBlock`.
        laurel: a learned residual beside attention, likewise.
        altup: mixes residual streams around both parts, likewise.
        streams: n, of both residuals.
    """

    def __init__(
        self,
        *,
        attention: nn.Module,
        ffn: nn.Module,
        attention_residual: nn.Module | None = None,
        ffn_residual: nn.Module | None = None,
        attention_norm: nn.Module | None = None,
        attention_post_norm: nn.Module | None = None,
        ffn_norm: nn.Module | None = None,
        ffn_post_norm: nn.Module | None = None,
        parallel: bool = False,
        shared_norm: bool = False,
        scale: float = 1.0,
        streams: int = 1,
        scalar: nn.Module | None = None,
        layer_input: nn.Module | None = None,
        laurel: nn.Module | None = None,
        altup: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.parallel, self.shared_norm, self.scale, self.streams = parallel, shared_norm, scale, streams
        self.attention_residual = attention_residual or Addition()
        self.attention_norm = attention_norm or nn.Identity()
        self.attention = attention
        self.attention_post_norm = attention_post_norm or nn.Identity()
        self.middle = nn.Identity()
        """The stream between the parts passes through here, for taps: norms may be others by position."""
        self.ffn_residual = ffn_residual or Addition()
        self.ffn_norm = ffn_norm or nn.Identity()
        self.ffn = ffn
        self.ffn_post_norm = ffn_post_norm or nn.Identity()
        self.layer_input = layer_input or nn.Identity()
        self.laurel, self.altup = laurel or nn.Identity(), altup or nn.Identity()
        self.scalar = scalar or nn.Identity()
        self.has = {name: not isinstance(getattr(self, name), LeftOut) for name in ("attention", "ffn")}
        """Whether the block has each of its parts."""
        self.ffn_caches = hasattr(ffn, "new_cache") and self.has["ffn"]
        """Whether the feed-forward part, too, depends on earlier positions, and has a cache in generation."""
        if not self.has["attention"] and not self.ffn_caches:
            self.mixes_positions = False
            """See `forge_kit.nn.position_probe.mixes_positions`: else a block that names no mixer is a mistake."""

    def forward(self, carry: Carry, batch: Batch, cache: Any = None) -> Carry:
        """Returns the stream after both parts. `cache` is of `new_cache`; None: there is none."""
        (x,) = carry
        of_ffn: tuple[Any, ...] = ()
        if self.ffn_caches and cache is not None:
            of_ffn, cache = (cache["ffn"],), cache["attention"]
        if not self.parallel:
            if self.has["attention"]:
                x = self.attention_residual(x, lambda own: self.added("attention", own, batch, cache))
            x = self.middle(x)
            if self.has["ffn"]:
                x = self.ffn_residual(x, lambda own: self.added("ffn", own, batch, *of_ffn))
            return (self.ended(x),)
        # Both parts read x, whatever is added to it first. A shared norm is computed once, and so before either
        read = self.normalise("attention_norm", x, batch) if self.shared_norm else x
        x = self.middle(self.attention_residual(x, lambda _: self.added("attention", read, batch, cache)))
        return (self.ended(self.ffn_residual(x, lambda _: self.added("ffn", read, batch, *of_ffn))),)

    def new_cache(self, batch_size: int, length: int) -> Any:
        """Returns the cache of attention, or with one of the feed-forward part both, by name."""
        attention: Any = self.attention
        own = attention.new_cache(batch_size, length)
        if not self.ffn_caches:
            return own
        ffn: Any = self.ffn
        return LayerCaches({"attention": own, "ffn": ffn.new_cache(batch_size, length)})

    def prepare_decode(self, batch: Batch, cache: Any) -> Batch:
        """Returns the batch of the next positions with the entries that attention needs, beside its cache."""
        return parts.prepare_decode(self.attention, batch, cache["attention"] if self.ffn_caches else cache)

    def ended(self, x: Tensor) -> Tensor:
        """Returns the stream after the layer, from the stream after both parts."""
        scaled: Tensor = self.scalar(x)
        return scaled

    def added(self, name: str, x: Tensor, batch: Batch, *cache: Any) -> Tensor:
        """Returns what the part `name` adds to the stream, from what it reads of it, x (B, S, D)."""
        own = self.update(name, x, batch, *cache)
        # No product with 1, which would cost a pass over x in each part
        return own if self.scale == 1 else own * self.scale

    def update(self, name: str, x: Tensor, batch: Batch, *cache: Any) -> Tensor:
        """Returns what the part `name` makes of x (B, S, D), its norms included; a shared norm is in x already."""
        if not self.shared_norm:
            x = self.normalise(f"{name}_norm", x, batch)
        x = getattr(self, name)(x, batch, *cache)
        return self.normalise(f"{name}_post_norm", x, batch)

    def normalise(self, name: str, x: Tensor, batch: Batch) -> Tensor:
        """Returns the norm `name` of x (B, S, D); a derived class may have others by position."""
        normalised: Tensor = getattr(self, name)(x)
        return normalised

    def stream_writers(self) -> Sequence[str]:
        """Names parameters so that what the block adds to the stream is proportional to them, one for each part.

        Raises:
            ForgeError: a part does not name its own, or something else than the parts and their sum is in the block.
        """
        plain = {"attention_residual": Addition, "ffn_residual": Addition}
        for name in ("attention_residual", "ffn_residual", "laurel", "altup", "layer_input"):
            if not isinstance(module := getattr(self, name), plain.get(name, nn.Identity)):
                raise ForgeError(f"{name} is a {type(module).__name__}, to which the stream is not proportional")
        names: list[str] = []
        for name in ("attention", "ffn"):
            norm = f"{name}_post_norm"
            if not self.has[name]:
                continue
            if isinstance(getattr(self, norm), nn.Identity):
                names += parts.stream_writers(name, getattr(self, name))
            else:
                names += parts.last_parameters(self, norm)
        return names

    def unit_scales(self, seq_len: int) -> Mapping[str, float]:
        """Returns, by the `stream_writers`, the factor by which the input of each has a size of 1 at the start.

        Raises:
            ForgeError: a part does not state it, or does not name its writers.
        """
        factors = dict.fromkeys(self.stream_writers(), 1.0)
        for name in ("attention", "ffn"):
            # Behind a norm the size is 1 already
            if self.has[name] and isinstance(getattr(self, f"{name}_post_norm"), nn.Identity):
                factor = parts.unit_scale(name, getattr(self, name), seq_len)
                factors |= {key: factor for key in factors if key.startswith(f"{name}.")}
        return factors

    def tap_points(self) -> Mapping[str, TapPoint]:
        """The residual stream if it is a single one, what each part adds to it, and the points of the parts."""
        points: dict[str, TapPoint] = {}
        if self.streams == 1:  # a point is a vector of a position
            points |= {"resid_pre": TapPoint("", "carry_in"), "resid_post": TapPoint("", "carry_out")}
        if self.streams == 1 and not self.parallel and all(self.has.values()):  # else no stream is between two parts
            points["resid_mid"] = TapPoint("middle")
        for name, point in (("attention", "attn_out"), ("ffn", "mlp_out")):
            if not self.has[name]:
                continue
            # The tensor that is added to the stream: the norm's output where one follows the part
            has_norm = not isinstance(getattr(self, f"{name}_post_norm"), nn.Identity)
            points[point] = TapPoint(f"{name}_post_norm" if has_norm else name)
            points |= tap_points(getattr(self, name), name)
        return points


class CarryingBlock(Block):
    """A block of a model whose carry has more than the stream.

    It is (x, keys, values, keys, values, …, inputs): a pair (B, S, K, E) for each layer whose keys and values later
    layers attend to, and with `layer_input` the inputs of all layers, (B, S, L, P).
    """

    def __init__(
        self,
        block: Block,
        *,
        layer_input: nn.Module | None,
        number: int,
        pair: int | None,
        lends: bool,
        laurel: nn.Module | None = None,
        altup: nn.Module | None = None,
        streams: int = 1,
    ) -> None:
        """Set up the block.

        Args:
            block: of the same parts.
            layer_input: adds the input of this layer, see `LayerInputReader`; None: there is none.
            number: of the layer, from 0.
            pair: number of the pair that its attention makes or attends to; None: no other layer has its keys.
            lends: whether it makes that pair.
            laurel: what is added to the output of attention, a function of what it reads; None: nothing.
            altup: predicts and corrects the streams, on one of which the layer computes; None: there is one.
            streams: of the carry.
        """
        own = {name: getattr(block, name) for name in PARTS if name not in ("layer_input", "laurel", "altup")}
        if laurel is not None:
            own["attention_residual"] = HalvedAddition()
        super().__init__(
            **own,
            layer_input=layer_input,
            laurel=laurel,
            altup=altup,
            parallel=block.parallel,
            shared_norm=block.shared_norm,
            scale=block.scale,
            scalar=block.scalar,
            streams=max(streams, block.streams),
        )
        self.has_laurel, self.has_altup = laurel is not None, altup is not None
        self.number, self.pair, self.lends = number, pair, lends
        self.reads_input = layer_input is not None
        if lends:
            attention: Any = self.attention
            attention.lends = True

    def forward(self, carry: Carry, batch: Batch, cache: Any = None) -> Carry:
        """Returns the carry after the layer; `cache` is that of the layer whose keys and values it attends to."""
        x, *further = carry
        exchange = None
        if self.pair is not None and cache is None:
            exchange = KVExchange(*further[2 * self.pair : 2 * self.pair + 2])
        place = cache if exchange is None else exchange
        if self.has_altup:
            x, active = self.altup(x, lambda own: Block.forward(self, (own,), batch, place)[0])
            if self.reads_input:
                reader: Any = self.layer_input
                added = reader.added(active, further[-1][:, :, self.number])
                # To all streams but the first, as in Gemma 3n
                x = torch.cat([x[..., :1, :], x[..., 1:, :] + added.unsqueeze(-2)], -2)
        else:
            (x,) = super().forward((x,), batch, place)
            if self.reads_input:
                x = self.layer_input(x, further[-1][:, :, self.number])
        if exchange is not None and self.lends and self.pair is not None:
            further[2 * self.pair : 2 * self.pair + 2] = exchange.keys, exchange.values
        # As views: a pipeline detaches what it sends in place, unless it is one
        return (self.scalar(x), *(tensor.view_as(tensor) for tensor in further))

    def update(self, name: str, x: Tensor, batch: Batch, *cache: Any) -> Tensor:
        """As `Block.update`; beside attention is the learned residual of what it reads."""
        if name != "attention" or not self.has_laurel:
            return super().update(name, x, batch, *cache)
        x = self.normalise("attention_norm", x, batch)
        mixed = self.normalise("attention_post_norm", self.attention(x, batch, *cache), batch)
        residual: Tensor = self.laurel(x)
        return mixed + residual

    def ended(self, x: Tensor) -> Tensor:
        """Returns the stream as it is: `forward` adds the input of the layer before the scalar."""
        return x

    def extra_repr(self) -> str:
        return f"pair={self.pair}, lends={self.lends}"
