"""Linear probes that train while the model does.

Shapes: N samples of a step, D features of a point, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from forge_core.contracts.errors import ForgeError
from forge_core.parallel.mesh import gather_objects
from forge_plugin_taps.kinds import Sink
from forge_plugin_taps.owners import Owners
from forge_plugin_taps.sampling import chosen_positions

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_taps.kinds import TapsInfo
    from forge_plugin_taps.probe import Probe
    from forge_plugin_taps.samples import Sample

METRICS = ("accuracy", "loss", "majority")
LEAST_DEVIATION = 1e-6
"""Smallest standard deviation of a feature that is divided by."""


class ProbeSink(Sink):
    """See `Probe`."""

    def __init__(self, settings: Probe, context: BuildContext, taps: TapsInfo) -> None:
        self.settings, self.context, self.rows = settings, context, taps.rows
        self.owners = Owners(taps.points, context.device)
        self.classes = settings.classes or _classes(settings.target, context, taps)
        self.function = context.load_object(settings.target) if ":" in settings.target else None
        self.probes: dict[str, LinearProbe] = {}
        """Of this rank's points, once their widths are known."""
        self.measured: dict[str, Tensor] = {}

    def consume(self, sample: Sample) -> None:
        """Measures each probe on held-out samples of the step, then trains it on the others. Collective."""
        target_N = self._target(sample)
        known_N = (target_N >= 0) & (target_N < self.classes)
        held_N = self._held_out(sample) & known_N
        kept_N = known_N & ~held_N
        own: dict[str, dict[str, Tensor]] = {}
        for name, (x_ND,) in self.owners.gather(sample, {name: [name] for name in self.owners.rank_of}).items():
            if name not in self.probes:
                self.probes[name] = LinearProbe(x_ND.shape[1], self.classes, self.settings, x_ND.device)
            probe = self.probes[name]
            # Which samples is known on the host, so that no selection waits for the device
            held, kept = (mask.nonzero().squeeze(1).to(x_ND.device, non_blocking=True) for mask in (held_N, kept_N))
            target = target_N.to(x_ND.device, non_blocking=True)
            own[name] = probe.measure(x_ND[held].float(), target[held])
            if len(kept):
                probe.learn(x_ND[kept].float(), target[kept])
        # A step whose held-out sequences have no known target has no metrics
        self.measured = self.owners.share(own, METRICS) if held_N.any() else {}

    def _target(self, sample: Sample) -> Tensor:
        if self.function is None:
            return sample.tokens[self.settings.target]
        target = self.function(sample.tokens)
        if not isinstance(target, Tensor) or target.shape != (len(sample),) or target.is_floating_point():
            seen = f"{tuple(target.shape)} {target.dtype}" if isinstance(target, Tensor) else repr(target)
            raise ForgeError(f"taps: {self.settings.target} must return ({len(sample)},) integers, returned {seen}")
        return target.to("cpu", torch.int64)

    def _held_out(self, sample: Sample) -> Tensor:
        """(N) whether each sample is of a held-out sequence: a function of seed, step and row. At least one is."""
        # Row -1 seeds the choice of sequences, apart from the choice of positions in each of them
        count = max(1, round(self.settings.held_out * self.rows))
        seed = self.context.job.job.seed
        rows = chosen_positions(seed, sample.step, [-1], self.rows, min(count, self.rows - 1) or 1)
        first = int(sample.tokens["row"].min())  # where several runs share the global batch
        return torch.isin(sample.tokens["row"] - first, torch.from_numpy(rows[0]))

    def metrics(self) -> Mapping[str, float | Tensor]:
        """Returns the metrics of the last sampled step; none if it had no held-out sample with a class."""
        return {f"probe/{self.settings.folder}/{name}": value for name, value in self.measured.items()}

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the probes of this rank, by point."""
        return {f"{name}/{key}": tensor for name, probe in self.probes.items() for key, tensor in probe.state().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the probes of this rank's points; the number of ranks may differ from the saved one.

        Raises:
            ForgeError: a probe in the checkpoint has another number of classes.
        """
        self.probes = {}
        for name, own in self.owners.of_rank(state).items():
            classes, width = own["weight"].shape
            if classes != self.classes:
                counts = f"{classes} classes in the checkpoint, {self.classes} now"
                raise ForgeError(f"taps: sink {self.settings.folder}: the probe of {name} has {counts}")
            self.probes[name] = LinearProbe(width, classes, self.settings, self.context.device)
            self.probes[name].load(own)

    def close(self, final: bool) -> None:
        """Writes the probes at the end of the run; nothing if it is to continue. Collective."""
        if not final or self.context.folder is None:
            return
        folder = self.context.folder / self.settings.folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, probe in self.probes.items():
            # Renamed when it is whole, so that no reader finds a part of a file
            part = folder / f".{name}.part"
            save_file(probe.folded(), part)
            part.replace(folder / f"{name}.safetensors")
        gather_objects(None)  # no rank continues to read files that another rank has yet to write


class LinearProbe:
    """Softmax regression on standardised features, in float32."""

    def __init__(self, width: int, classes: int, settings: Probe, device: torch.device) -> None:
        self.settings = settings
        # Zeros: the loss is convex, and needs no random start
        self.weight = torch.zeros(classes, width, device=device, requires_grad=True)
        self.bias = torch.zeros(classes, device=device, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.weight, self.bias], settings.lr, weight_decay=settings.weight_decay)
        # Over many steps, a float32 mean would stop moving
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean, self.squares = (torch.zeros(width, dtype=torch.float64, device=device) for _ in range(2))
        """Mean of each feature, and sum of the squared distances from it."""
        self.seen = torch.zeros(classes, dtype=torch.int64, device=device)
        """Samples of each class."""

    @torch.no_grad()
    def measure(self, x_ND: Tensor, target_N: Tensor) -> dict[str, Tensor]:
        """Accuracy, loss and the majority's accuracy on samples, as scalars on the device."""
        # Before the probe learns from this step
        logits = self._logits(x_ND)
        right = (logits.argmax(1) == target_N).double().mean()
        return {
            "accuracy": right,
            "loss": cross_entropy(logits, target_N).double(),
            "majority": (target_N == self.seen.argmax()).double().mean(),
        }

    def learn(self, x_ND: Tensor, target_N: Tensor) -> None:
        """Take samples into mean and deviation, then make the updates of a step on them."""
        self._standardise(x_ND.double())
        self.seen.scatter_add_(0, target_N, torch.ones_like(target_N))
        for _ in range(self.settings.updates):
            # All samples at once, so that an update does not depend on an order
            cross_entropy(self._logits(x_ND), target_N).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _standardise(self, x_ND: Tensor) -> None:
        """Join the moments of two sets of samples (Chan, Golub and LeVeque 1979)."""
        count, mean = len(x_ND), x_ND.mean(0)
        total = self.count + count
        apart = mean - self.mean
        self.squares += (x_ND - mean).square().sum(0) + apart.square() * (self.count * count / total)
        self.mean += apart * (count / total)
        self.count += count

    @property
    def deviation(self) -> Tensor:
        """Standard deviation of each feature (D,) over all samples so far, at least `LEAST_DEVIATION`; float64."""
        return (self.squares / self.count.clamp(min=1)).sqrt().clamp(min=LEAST_DEVIATION)

    def _logits(self, x_ND: Tensor) -> Tensor:
        return ((x_ND - self.mean) / self.deviation).float() @ self.weight.T + self.bias

    def folded(self) -> dict[str, Tensor]:
        """Weight and bias for activations that are not standardised."""
        # In float64: the bias is a difference of large numbers where a feature's mean is far from 0
        weight = self.weight.detach().double() / self.deviation
        bias = self.bias.detach().double() - weight @ self.mean
        return {"weight": weight.float().cpu().contiguous(), "bias": bias.float().cpu()}

    def state(self) -> dict[str, Tensor]:
        """All that the next update depends on."""
        saved = {name: getattr(self, name).detach() for name in ("weight", "bias", "count", "mean", "squares", "seen")}
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            # By slot and not as `optimizer.state_dict()`, which is nested and has no tensors by name
            saved |= {f"adam.{name}.{slot}": value for slot, value in self.optimizer.state[parameter].items()}
        return saved

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for name in ("weight", "bias", "count", "mean", "squares", "seen"):
            getattr(self, name).copy_(state[name])
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            prefix = f"adam.{name}."
            slots = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if slots:  # Adam counts its steps on the CPU
                where = {slot: "cpu" if slot == "step" else parameter.device for slot in slots}
                self.optimizer.state[parameter] = {slot: value.to(where[slot]) for slot, value in slots.items()}


def _classes(target: str, context: BuildContext, taps: TapsInfo) -> int:
    if target == "position":
        return taps.length
    if target == "source":
        return len(context.job.data.sources)
    assert context.tokenizer is not None
    return context.tokenizer.vocab_size
