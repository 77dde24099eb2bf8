"""The decoder-only transformer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Role
from forge_kit.nn.modules import Embedding, LinearHead
from forge_kit.nn.taps import TapPoint, tap_points
from forge_plugin_transformer.modules import parts
from forge_plugin_transformer.modules.block import PARTS, Block
from forge_plugin_transformer.modules.cache import LayerCaches
from forge_plugin_transformer.modules.drafts import ModuleDrafts
from forge_plugin_transformer.modules.ends import PositionCount, PositionTable
from forge_plugin_transformer.modules.multi_token import IDS, LABELS, PredictionBlock, Predictions
from forge_plugin_transformer.modules.residual import collapsed, expanded
from forge_plugin_transformer.torch_internals import KeepsTies

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch
    from forge_core.contracts.model import Carry

POSITIONS = "positions"
"""Name of the table of learned positions, and of their count in a cache."""
INPUTS = "per_layer_inputs"


class TransformerModel(KeepsTies):
    """Embedding, blocks, final norm and head; see `forge_core.contracts.model.Model`.

    `forward(batch)` returns hidden states (B, S, D) in the dtype of the embedding's output, or in float32 with
    `wide_head`, and so are its logits. Implements generation and every protocol by which stages and the engine query a
    model.
    """

    def __init__(
        self,
        *,
        embedding: Embedding,
        layers: Mapping[str, Block],
        norm: nn.Module,
        head: LinearHead,
        tied: bool,
        wide_head: bool = False,
        mtp: Predictions | None = None,
        positions: PositionTable | None = None,
        streams: int = 1,
        per_layer_inputs: nn.Module | None = None,
        altup: tuple[nn.Module, nn.Module] | None = None,
        kv_sources: Mapping[str, str] | None = None,
        kv_shapes: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Set up the model.

        Args:
            embedding: table of tokens.
            layers: blocks by their numbers; those of `CarryingBlock` where one of the last three arguments is given.
            norm: before the head.
            head: makes logits.
            tied: whether the head has the table of tokens.
            wide_head: whether logits are float32.
            mtp: modules of multi-token prediction.
            positions: table of positions.
            streams: residual streams between layers.
            per_layer_inputs: makes the inputs of all layers.
            altup: make the residual streams of embeddings, and one stream of them; None: they are copied and added up.
            kv_sources: layers that attend to keys and values of another, and that layer.
            kv_shapes: heads (of a rank) and width of the keys of each such other layer, by their order.
        """
        super().__init__()
        self.embedding = embedding
        self.positions = positions
        self.longest = 0 if positions is None else len(positions.weight)
        """Learned positions, also where another pipeline rank has their table; 0: there are none."""
        self.layers = nn.ModuleDict(layers)
        self.norm = norm
        self.head = head
        self.mtp = mtp
        self.tied = tied
        self.wide_head = wide_head
        self.streams = streams
        """Residual streams between layers."""
        self.per_layer_inputs = per_layer_inputs
        self.expansion: nn.Module | None = None if altup is None else altup[0]
        self.contraction: nn.Module | None = None if altup is None else altup[1]
        self.kv_sources, self.kv_shapes, self.depth = kv_sources or {}, kv_shapes, len(layers)
        self.tie()

    def prepare_sequences(self, batch: Batch) -> Batch:
        """Adds the ids and labels of later positions in a training step of multi-token prediction."""
        if not isinstance(self.mtp, Predictions) or "labels" not in batch:  # another pipeline rank has the predictions
            return batch
        return self.mtp.look_ahead(batch)

    def sequence_entries(self) -> Sequence[str]:
        """Names the entries (B, S, K) of multi-token prediction, which a batch need not have."""
        return [IDS, LABELS]

    def prepare(self, batch: Batch) -> Batch:
        """Adds the entries that the parts need; one that several layers share is made once."""
        batch = self.prepare_sequences(batch)
        for _, part in self._parts():
            batch = parts.prepare(part, batch)
        return batch

    def embed(self, batch: Batch) -> Carry:
        """Adds learned positions, if there are any, to the tokens' embeddings: without `positions`, 0 to S - 1.

        Returns (x (B, S, D),), or with several residual streams as many equal ones, (x (B, S, n, D),). Behind them are
        keys and values (B, S, K, E) for each layer whose own are those of others, zeros until that layer, and the
        inputs of all layers, (B, S, L, P).
        """
        ids = batch["input_ids"]
        x = self.embedded(batch)
        shared = [x.new_zeros(*ids.shape, *shape) for shape in self.kv_shapes for _ in ("keys", "values")]
        inputs = [] if self.per_layer_inputs is None else [self.per_layer_inputs(ids, x)]
        return (self._stream(x, batch), *shared, *inputs)

    def embedded(self, batch: Batch) -> Tensor:
        """Returns the embeddings (B, S, D) of tokens; derived classes may add features to them."""
        x: Tensor = self.embedding(batch["input_ids"])
        return x

    def _stream(self, x: Tensor, batch: Batch) -> Tensor:
        """Returns the stream before the first layer, from the embeddings of tokens."""
        if self.expansion is not None:
            x = x if self.positions is None else x + self._positions_of(batch, x)
            streams: Tensor = self.expansion(x)
            return streams
        return expanded(x if self.positions is None else x + self._positions_of(batch, x), self.streams)

    def _positions_of(self, batch: Batch, x: Tensor) -> Tensor:
        """Returns the learned vectors of positions, for the embeddings of tokens."""
        assert self.positions is not None
        length = batch["input_ids"].shape[1]
        # One row for all sequences, which the sum broadcasts: the table is looked up S times and not B S times
        numbers = batch["positions"] if "positions" in batch else torch.arange(length, device=x.device)[None]
        vectors: Tensor = self.positions(numbers)
        return vectors

    def finish(self, carry: Carry, batch: Batch) -> Tensor:
        """Adds up residual streams, applies the last norm, and in a training step multi-token prediction."""
        one = collapsed(carry[0], self.streams) if self.contraction is None else self.contraction(carry[0])
        hidden = self.norm(one)
        # Again, for callers that have not prepared the batch; it is unchanged if it has the entries
        batch = self.prepare_sequences(batch)
        if self.mtp is not None and IDS in batch:
            hidden = self.mtp(hidden, self.embedding, self.head, batch)
        # A head and the losses compute in the dtype of the states that they are given
        return hidden.to(torch.promote_types(hidden.dtype, torch.float32)) if self.wide_head else hidden

    # --- generation ----------------------------------------------------------------------------------------------

    def new_cache(self, batch_size: int, length: int) -> LayerCaches:
        """Creates each layer's own cache, by the layer's name; a layer with keys and values of another has none.

        Raises:
            ForgeError: layers share keys and values, and other pipeline ranks have some of the layers.
        """
        if self.kv_sources and len(self.layers) < self.depth:
            message = "model.kv_shared_layers: keys in the cache of a layer are not sent to other pipeline ranks"
            raise ForgeError(f"{message}; generate without parallel.pp")
        layers: dict[str, Any] = {n: layer for n, layer in self.layers.items() if n not in self.kv_sources}
        caches = {name: layer.new_cache(batch_size, length) for name, layer in layers.items()}
        counts = {POSITIONS: PositionCount(self.longest, length)} if self.longest else {}
        return LayerCaches(counts | caches)

    def decode(self, batch: Batch, cache: Mapping[str, Any]) -> Tensor:
        """Decodes one position by direct copies of the layers, which need fewer calls, and several by the layers."""
        if POSITIONS in cache:
            batch = cache[POSITIONS].numbered(batch)
        layers: dict[str, Any] = dict(self.layers.items())
        if batch["input_ids"].shape[1] == 1 and isinstance(cache, LayerCaches):
            layers = cache.direct(layers)
        for name, layer in layers.items():
            batch = layer.prepare_decode(batch, cache[self.kv_sources.get(name, name)])
        carry = self.embed(batch)
        for name, layer in layers.items():
            carry = layer(carry, batch, cache[self.kv_sources.get(name, name)])
        return self.finish(carry, batch)

    @property
    def draft_length(self) -> int:
        """One token for each module of multi-token prediction; see `forge_kit.nn.generation.DraftsTokens`."""
        return len(list(self._predictions()))

    def new_drafter(self, length: int) -> ModuleDrafts:
        """Returns the modules of multi-token prediction with caches for one row."""
        return ModuleDrafts([block for _, block in self._predictions()], self.embedding, self.head, length)

    # --- queries of the engine and the stages --------------------------------------------------------------------

    def flops(self, seq_len: int) -> float:
        """Counts the parts of all blocks, and the head once more for each module of multi-token prediction."""
        heads = 1 + len(list(self._predictions()))
        # 6 for each weight and position: 2 in the forward pass, 4 in the backward pass; a look-up in a table costs none
        layers = sum(parts.flops(part, seq_len) for _, part in self._parts())
        layers += 0 if self.contraction is None else parts.flops(self.contraction, seq_len)
        # Not of `embed_flops`, to which a class derived from this one may add what it adds here itself
        return self._input_flops(seq_len) + layers + 6.0 * self.head.weight.numel() * heads

    def embed_flops(self, seq_len: int) -> float:
        """Returns the FLOPs of `embed`: of projections to inputs of layers and to further streams."""
        return self._input_flops(seq_len)

    def _input_flops(self, seq_len: int) -> float:
        """Counts projections to inputs of layers and to further streams, if there are any, 6 for each weight."""
        projection = getattr(self.per_layer_inputs, "projection", None)  # another pipeline rank may have it
        streams = 0.0 if self.expansion is None else parts.flops(self.expansion, seq_len)
        return streams + (0.0 if projection is None else 6.0 * projection.weight.numel())

    def layer_flops(self, seq_len: int) -> Sequence[float]:
        """Returns the sum over each layer's parts, without multi-token prediction, which is no layer."""
        return [sum(parts.flops(getattr(layer, name), seq_len) for name in PARTS) for layer in self.layers.values()]

    def parameter_roles(self) -> Mapping[str, Role]:
        """Gives tables the role of an embedding, and a tied head none, as it is listed as the embedding."""
        roles: dict[str, Role] = {f"{name}.weight": "embedding" for name in self._tables()}
        for name, part in (*self._parts(), ("norm", self.norm)):
            roles |= parts.roles(name, part)
        if self.per_layer_inputs is not None:
            roles = {**parts.roles(INPUTS, self.per_layer_inputs), **roles}
        for name, end in self._stream_ends().items():
            roles |= parts.roles(name, end)
        return roles if self.tied else roles | {"head.weight": "head"}

    def stream_writers(self) -> Sequence[str]:
        """Names parameters of all layers so that what each adds to the stream is proportional to them.

        Raises:
            ForgeError: a part of a layer does not name its own.
        """
        return [key for number, layer in self.layers.items() for key in parts.stream_writers(f"layers.{number}", layer)]

    def unit_scales(self, seq_len: int) -> Mapping[str, float]:
        """Returns, by the `stream_writers` of all layers, the factor by which the input of each has a size of 1.

        Raises:
            ForgeError: a part of a layer does not state it.
        """
        layers: Any = self.layers
        own = ((f"layers.{number}", layer.unit_scales(seq_len)) for number, layer in layers.items())
        return {f"{name}.{key}": factor for name, factors in own for key, factor in factors.items()}

    def score_weights(self) -> Sequence[tuple[Sequence[str], int, float]]:
        """Returns, for each attention that may derive the width of its heads: see `GroupedAttention.score_weights`."""
        own: list[tuple[str, Any]] = [(name, part) for name, part in self._parts() if hasattr(part, "score_weights")]
        asked = ((name, part.score_weights()) for name, part in own)
        return [([f"{name}.{key}" for key in keys], width, factor) for name, (keys, width, factor) in asked]

    def tied_parameters(self) -> Mapping[str, str]:
        """A tied head is listed under the embedding's name."""
        return {"head.weight": "embedding.weight"} if self.tied else {}

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """Ranks divide the rows of tables and head; norms compute on each rank's positions, parts by their plans."""
        plan: dict[str, Any] = dict.fromkeys(self._tables(), "vocab_embedding")
        for name, part in self._parts():
            plan |= parts.tensor_parallel_plan(name, part)
            # A norm that a block does not have is an `nn.Identity`, which the plan need not name
            if name.endswith(("norm", "projection")) and next(part.parameters(), None) is not None:
                plan[name] = "sequence"
            elif name.endswith(("_residual", "layer_input", "laurel", "altup")):
                plan |= parts.of_positions(name, part)
        # Their head runs inside of `finish`, after which the positions are gathered for the model's own loss
        objective = {} if self.mtp is None else {"mtp.objective": "whole_input"}
        inputs = [] if self.per_layer_inputs is None else [f"{INPUTS}.projection", f"{INPUTS}.norm"]
        inputs += [key for name, end in self._stream_ends().items() for key in parts.of_positions(name, end)]
        return plan | objective | dict.fromkeys([*inputs, "norm"], "sequence") | {"head": "vocab_head"}

    def sequence_mixers(self) -> Mapping[str, int]:
        """Returns the mixers of all blocks, of multi-token prediction too."""
        return dict(chain.from_iterable(parts.sequence_mixers(name, part).items() for name, part in self._parts()))

    def expert_stacks(self) -> Sequence[str]:
        """Returns the stacks of all blocks, of multi-token prediction too."""
        return list(chain.from_iterable(parts.expert_stacks(name, part) for name, part in self._parts()))

    def ends(self) -> tuple[Sequence[str], Sequence[str]]:
        """With multi-token prediction, the embedding is in both ends: it looks up later tokens."""
        further = ["embedding", "mtp"] if self.mtp is not None else []
        return self._first(), [*self._contraction(), "norm", "head", *further]

    def fsdp_units(self) -> Sequence[Sequence[str]]:
        """Units of FSDP. A table used at both ends belongs to the head's unit and stays gathered throughout."""
        both = self.tied or self.mtp is not None
        tables = self._first()
        last = [*self._contraction(), "norm", "head"]
        ends = [[*tables, *last]] if both else [tables, last]
        blocks = [f"layers.{name}" for name in self.layers] + self._prediction_blocks()
        return [ends[0], *([name] for name in blocks), *ends[1:]]

    def tap_points(self) -> Mapping[str, TapPoint]:
        """Embedding and last norm, with the points of every layer as `layers.N.NAME`."""
        points = {"embed": TapPoint("embedding")}
        for number, layer in self.layers.items():
            points |= tap_points(layer, f"layers.{number}", f"layers.{number}")
        return points | {"final_norm": TapPoint("norm")}

    def further_blocks(self) -> list[str]:
        """The blocks of multi-token prediction, which `finish` runs."""
        return self._prediction_blocks()

    def float8_exempt(self) -> Sequence[str]:
        """Exempts the head, the projections of multi-token prediction, and what the parts exempt."""
        inner = chain.from_iterable(parts.float8_exempt(name, part) for name, part in self._parts())
        joins = [f"{name}.projection" for name in self._prediction_blocks()]
        inputs = [] if self.per_layer_inputs is None else [f"{INPUTS}.projection"]
        ends = (key for name, end in self._stream_ends().items() for key in parts.of_positions(name, end))
        return [*inner, *joins, *inputs, *ends, "head"]

    def backend_choices(self, seq_len: int) -> Sequence[tuple[str, str, str]]:
        """Returns the kernels for sequences of this length, as (what, choice, why), each once."""
        choices = (parts.backend_choices(part, seq_len) for _, part in self._parts())
        return list(dict.fromkeys(chain.from_iterable(choices)))

    def _tables(self) -> list[str]:
        """Names of the tables that `embed` looks up."""
        tables = ["embedding", POSITIONS] if self.longest else ["embedding"]
        return tables if self.per_layer_inputs is None else [*tables, f"{INPUTS}.table"]

    def _first(self) -> list[str]:
        """Names of the modules of `embed`."""
        first = [name.removesuffix(".table") for name in self._tables()]
        return first if self.expansion is None else [*first, "expansion"]

    def _contraction(self) -> list[str]:
        return [] if self.contraction is None else ["contraction"]

    def _stream_ends(self) -> dict[str, nn.Module]:
        """Returns the modules around all layers that make streams and a single one of them, if there are any."""
        ends = {"expansion": self.expansion, "contraction": self.contraction}
        return {name: end for name, end in ends.items() if end is not None}

    def _parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields each block's parts with their names, in order."""
        # By attribute, which a wrapper around the block forwards, as stages may have wrapped it.
        for number, layer in self.layers.items():
            for name in PARTS:
                yield f"layers.{number}.{name}", getattr(layer, name)
        for depth, block in self._predictions():
            for name in PredictionBlock.PARTS:
                yield f"mtp.blocks.{depth}.{name}", getattr(block, name)

    def _predictions(self) -> Iterator[tuple[int, PredictionBlock]]:
        """Yields the modules of multi-token prediction on this pipeline rank, by number."""
        if isinstance(self.mtp, Predictions):
            yield from enumerate(self.mtp.blocks)  # type: ignore[misc]

    def _prediction_blocks(self) -> list[str]:
        # Separate from `further_blocks`, which a class derived from this one may extend with its own blocks.
        return [f"mtp.blocks.{number}" for number, _ in self._predictions()]

    # --- the tie -------------------------------------------------------------------------------------------------

    def tie(self) -> None:
        """Let the head have the embedding's table, if the model is tied."""
        if self.tied and next(self.embedding.parameters(), None) is not None:  # else another pipeline rank has it
            self.head.weight = self.embedding.weight
