"""FLOPs of training steps: of the images that their batches have, and of what trains.

`Model.flops` is stated once, for rows full of patches and a model of which everything trains. Here they are counted.
The model is divided into parts, in the order of the forward pass: the encoder, the adapters, what else `embed` uses,
each layer of the language model, and what comes behind them. A product with a weight costs 2 FLOPs per element in
the forward pass, 2 for the gradient of its input, and 2 for the gradient of the weight; attention costs 4 for each
element of a pair of positions in the forward pass, and 8 for its gradients. Of these,

- the gradient of an input is needed in a part that trains, at least in part, or that comes behind one which does;
- the gradient of a weight where the weight trains.

So a frozen tower costs 2 of 6, and a frozen language model 4 of 6 if something before it trains. The encoder and the
adapters are a part each, whose attention counts like their weights. In the first part that trains, the first product
needs no gradient of its input, and has one here, as it does in the convention of 6 a weight.

Shapes: B rows, N images of a row at most, K parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_kit.torch_internals import parameters_of
from forge_plugin_vision.kinds import GRIDS, PATCHES, Grid

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Batch

FLOPS_PER_TOKEN = "flops_per_token"
"""The metric by which MFU goes; see `forge_core.contracts.model.Model.flops`."""
COUNT = "vision/flops"
"""Count of the parts' FLOPs, and of what trains in them."""
ENCODER, ADAPTERS, EMBEDDING = range(3)
"""Numbers of the first parts; layers follow, and what comes behind them."""


class LayerCost(NamedTuple):
    """FLOPs of a layer of the language model, forward and backward."""

    weights: float
    """Of a token, of products with weights."""
    attention: float
    """Of a token, of products without weights."""
    feature_weights: float = 0.0
    """Of a feature of the row's images, of products with weights."""
    feature_attention: float = 0.0
    """Of a token and each feature of its row's images, of products without weights."""

    @classmethod
    def of(cls, one: float, two: float, full: float) -> LayerCost:
        """Returns the cost by the FLOPs a token in sequences of one position, of two, and of the job's length."""
        # Attention grows with the length, at least from one position to two, where a window ends neither.
        weights = 2 * one - two
        return cls(weights, full - weights)


class Part(NamedTuple):
    """Where a parameter is counted."""

    number: int
    share: float
    """Share of the part's products with weights that are with this one."""


class StepCost:
    """Counts FLOPs of the micro-batches of steps, for the metric `flops_per_token`."""

    def __init__(self, model: Any, layers: Sequence[LayerCost], context: BuildContext) -> None:
        """Take note of a whole model, before stages change it; `layers` are its `layer_costs`."""
        layout, self._length = context.layout, context.job.train.seq_len
        # All ranks that share a row know its images, and their counts are added up.
        self._sharing = layout.token_ranks // layout.data_parallel
        self._costs = [LayerCost(0.0, 0.0)] * (EMBEDDING + 1) + list(layers)
        self._parts = _parts(model, len(self._costs))
        self._counter = context.auxiliary.counter(COUNT, 0, unit="sequence")
        self._auxiliary = context.auxiliary
        self._own: list[tuple[Mapping[str, Any], str, Part]] | None = None
        self._last: tuple[Any, Tensor] | None = None
        self._of_features: Tensor | None = None
        context.auxiliary.summarise(COUNT, self._summary)

    def count(self, model: Any, batch: Batch) -> None:
        """Count a micro-batch, on each rank that has parts of the model; once, in a training step."""
        if not self._auxiliary.active or self._auxiliary.recomputing:  # not in evaluation, nor twice
            return
        rows = len(batch["input_ids"])
        values = self._of_row(model, batch["input_ids"].device) * rows
        encoder = getattr(model.vision, "encoder", None)  # one rank of a pipeline has it, and counts for all of them
        if encoder is not None and PATCHES in batch:
            self._add_images(values, model, batch[GRIDS])
        self._counter.add(values.flatten() / self._sharing)

    def _of_row(self, model: nn.Module, device: torch.device) -> Tensor:
        """Returns (K, 4): weights and attention of a row's tokens, the share that trains, and whether any does."""
        if self._own is None:  # only now, as stages may have taken modules away
            # By the modules' dictionaries, in which FSDP exchanges the parameters.
            modules = model.named_modules(remove_duplicate=False)
            self._own = [
                (parameters_of(module), key, self._parts[name])
                for path, module in modules
                for key in parameters_of(module)
                if (name := f"{path}.{key}" if path else key) in self._parts
            ]
        trained = tuple(
            part for own, key, part in self._own if (tensor := own[key]) is not None and tensor.requires_grad
        )
        if self._last is None or self._last[0] != trained:  # a copy to the device for each set of trained weights
            rows = [[0.0] * 4 for _ in self._costs]
            # Costs of all parts on the rank that has the encoder; on the others only what trains
            if getattr(getattr(model, "vision", None), "encoder", None) is not None:
                rows = [[cost.weights * self._length, cost.attention * self._length, 0.0, 0.0] for cost in self._costs]
            for number, share in trained:
                rows[number][2] += share
                rows[number][3] = 1.0
            self._last = trained, torch.tensor(rows, dtype=torch.float64, device=device)
        return self._last[1]

    def _add_images(self, values: Tensor, model: Any, grids: Tensor) -> None:
        # In float64, in which parts compute their FLOPs; features are counted in whole numbers below
        sides: Any = grids.double().unbind(-1)
        grid = Grid(*sides)
        for part, flops in ((ENCODER, model.vision.encoder_flops(grid)), (ADAPTERS, model.vision.adapter_flops(grid))):
            values[part, 0] += torch.as_tensor(flops).sum()
        if self._of_features is None:
            rows = [[cost.feature_weights, cost.feature_attention * self._length] for cost in self._costs]
            self._of_features = torch.tensor(rows, dtype=torch.float64, device=grids.device)
        whole: Any = grids.unbind(-1)
        features = torch.as_tensor(model.vision.image_input.features(Grid(*whole))).sum()
        values[:, :2] += self._of_features * features

    def _summary(self, rows: Mapping[int, Tensor]) -> Mapping[str, Tensor]:
        weights, attention, share, any_trains = rows[0].view(-1, 4).unbind(1)
        # 1 for parts at or behind the first that trains: they need the gradient of their input.
        passes = (any_trains.cumsum(0) > 0).double()
        # Thirds: forward, the gradient of the input, the gradient of the weight. Attention has two inputs and no
        # weight, so both its thirds go with `passes`.
        flops = weights * (1 + passes + share.clamp(max=1)) / 3 + attention * (1 + 2 * passes) / 3
        return {FLOPS_PER_TOKEN: flops.sum() / self._length}


def _parts(model: Any, count: int) -> dict[str, Part]:
    """Returns the part, of `count`, of each parameter by name; tied ones by each of their names."""
    ends, roles = model.ends(), model.parameter_roles()
    first = [f"{name}." for name in ("embedding", *(ends[0] if ends else ())) if name != "vision"]
    layers = {f"layers.{name}.": EMBEDDING + 1 + number for number, name in enumerate(model.layers)}
    layers = layers if count > EMBEDDING + 2 else {}  # else costs are known of the whole language model alone
    prefixes = {"vision.encoder.": ENCODER, "vision.": ADAPTERS, **dict.fromkeys(first, EMBEDDING), **layers}
    numbers, sizes, totals = dict[str, int](), dict[str, int](), [0] * count
    for name, parameter in model.named_parameters(remove_duplicate=False):
        numbers[name] = next((number for prefix, number in prefixes.items() if name.startswith(prefix)), count - 1)
        # Tables of positions and latents multiply nothing; a head may have the table of an embedding.
        looked_up = name.startswith("vision.") and roles.get(name) == "embedding"
        sizes[name] = parameter.numel() if parameter.ndim > 1 and not looked_up else 0
        totals[numbers[name]] += sizes[name]
    return {name: Part(number, sizes[name] / max(totals[number], 1)) for name, number in numbers.items()}
