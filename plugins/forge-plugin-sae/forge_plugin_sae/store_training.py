"""Training on the samples that the sink `store` has written. N samples of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from attrs import evolve, frozen
from torch import Tensor

from forge_core.contracts.errors import ForgeError
from forge_core.parallel.mesh import choose_device
from forge_plugin_sae.mixing import generator
from forge_plugin_sae.model import save
from forge_plugin_sae.quality import Quality
from forge_plugin_sae.sae import SAE
from forge_plugin_sae.sink import metadata, targets_of
from forge_plugin_sae.training import Trainer
from forge_plugin_taps import (
    PointInfo,
    TapsInfo,
    manifest_of,
    points_in,
    read_point,
    read_tokens,
    steps_of,
    steps_with,
)


@frozen
class Samples:
    """A folder of the sink `store`."""

    folder: Path
    steps: list[Path]
    """Folders of steps, ascending."""

    @classmethod
    def of(cls, path: Path) -> Samples:
        """The samples of a run, or in such a folder.

        Raises:
            ForgeError: there are none.
        """
        steps = steps_of(path)
        if not steps:
            hint = "a run with [parallel.taps.sinks.store] writes them"
            raise ForgeError(f"{path} holds no samples of activations (taps/step-N/taps.json); {hint}")
        return cls(steps[0].parent, steps)

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(manifest_of(self.steps[0])["selection"]["seed"])

    def info(self) -> TapsInfo:
        """What was captured, in any of the steps."""
        points = {}
        for name, having in steps_with(self.steps).items():
            entry = manifest_of(having[0])["files"][f"{name}.safetensors"]
            points[name] = PointInfo(entry["axes"], entry["layer"])
        # Only the points are read by `targets_of`
        return TapsInfo(points=points, interval=1, rows=0, positions=0, length=0)

    def having(self, *points: str) -> list[Path]:
        """Steps that have all of these points: one that nothing passed in a step is not in that one."""
        return [step for step in self.steps if {*points} <= {*points_in(step)}]

    def read(self, step: Path, point: str) -> Tensor:
        """The values (N, width) of a point in a step."""
        return read_point(step, point).flatten(1)

    def held_out(self, step: Path, share: float) -> Tensor:
        """(N) whether each sample is of a sequence that is only measured, drawn by step and sequence."""
        rows = read_tokens(step)["row"]
        # By sequence and not by token: tokens of one sequence are too alike to measure on some of them.
        drawn = torch.rand(int(rows.max()) + 1, generator=generator(f"{self.seed}:held out", int(step.name[5:])))
        return drawn[rows] < share


@frozen
class Trained:
    """An autoencoder that was trained on samples, with figures of those that were held out."""

    point: str
    latents: int
    rows: int
    updates: int
    dead: int
    figures: Mapping[str, float]
    """`explained_variance` and `l0`; none where nothing was held out."""


def train(settings: SAE, samples: Samples, epochs: int, held_out: float, device: str, out: Path) -> list[Trained]:
    """Train an autoencoder at each point, one after the other, and write each to `out`/POINT."""
    info = samples.info()
    received = settings.received(info)
    if not received:
        raise ForgeError(f"{samples.folder} has none of {', '.join(settings.points)}; it has {', '.join(info.points)}")
    targets = targets_of(settings, evolve(info, points={name: info.points[name] for name in received}))
    trained = []
    for name, target in targets.items():
        trainer = _trainer(settings, samples, name, target, choose_device(device))
        for _ in range(epochs):
            # The same samples are held out in every epoch, as the draw depends on seed and step alone
            for x_ND, target_NE in _rows(samples, name, target, held_out, held=False):
                trainer.add(x_ND, target_NE)
        trainer.finish()
        figures = _measure(trainer, _rows(samples, name, target, held_out, held=True))
        save(trainer.coder, out / name, metadata(name, target, str(samples.folder), figures))
        latents, dead = len(trainer.idle_F), int(trainer.dead.sum())
        trained.append(Trained(name, latents, trainer.rows, trainer.updates, dead, figures))
    return trained


def _trainer(settings: SAE, samples: Samples, name: str, target: str, device: torch.device) -> Trainer:
    if not (having := samples.having(name, target)):
        raise ForgeError(f"{samples.folder}: no step has both {name} and {target}")
    width, outputs = (samples.read(having[0], point).shape[1] for point in (name, target))
    if problem := settings.activation.size_problem(settings.latents_of(width)):
        raise ForgeError(f"{name} has {width} features: {problem}")
    # The seed of the sink: with all samples, in one epoch, both train the same
    seed = f"{samples.seed}:{settings.folder}:{name}"
    return Trainer(settings, width, None if target == name else outputs, seed, device)


def _rows(
    samples: Samples, name: str, target: str, share: float, *, held: bool
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inputs, and targets of a transcoder, of each step: those that are held out, or the others."""
    for step in samples.having(name, target):
        chosen = samples.held_out(step, share) == held
        if chosen.any():
            yield samples.read(step, name)[chosen], None if target == name else samples.read(step, target)[chosen]


@torch.no_grad()
def _measure(trainer: Trainer, rows: Iterator[tuple[Tensor, Tensor | None]]) -> dict[str, float]:
    coder, quality = trainer.coder.eval(), Quality(trainer.coder.W_dec.shape[1], trainer.idle_F.device)
    for x_ND, target_NE in rows:
        # In units of the model, which the saved weights are for; both figures are the same in any unit.
        x = x_ND.to(trainer.idle_F.device, trainer.dtype)
        target = x if target_NE is None else target_NE.to(x)
        quality.add(target, target - coder(x), coder.encode(x))
    return {key: float(value) for key, value in quality.metrics().items() if key != "loss"} if quality.rows else {}
