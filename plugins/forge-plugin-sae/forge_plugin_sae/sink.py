"""Sparse autoencoders that train while the model does. N samples of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forge_core.contracts.errors import ForgeError, did_you_mean
from forge_core.parallel.mesh import gather_objects, world_size
from forge_plugin_sae.model import SparseCoder, save
from forge_plugin_sae.training import Trainer
from forge_plugin_taps import Owners, Sink, shares_tokens

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_plugin_sae.sae import SAE
    from forge_plugin_taps import Sample, TapsInfo

METRICS = ("explained_variance", "l0", "loss", "dead", "updates")


class SAESink(Sink):
    """One `Trainer` for each point, on the rank that owns the point."""

    def __init__(self, settings: SAE, context: BuildContext, taps: TapsInfo) -> None:
        self.settings, self.context = settings, context
        self.targets = targets_of(settings, taps)
        """Point -> the point to reconstruct: itself, of an autoencoder."""
        self.owners = Owners(self.targets, context.device)
        used = {*self.targets, *self.targets.values()}
        splits = shares_tokens(context.layout)
        self.divided = [name for name in used if splits and taps.points[name].axes in ("heads", "hidden")]
        """Points of which no rank has all features; they are whole only where they are gathered."""
        self.trainers: dict[str, Trainer] = {}
        """Of this rank's points, once their widths are known: from the first sample, or a checkpoint."""
        self.rows = 0
        """Samples received of each point; the same on every rank."""
        self.updated = False

    def consume(self, sample: Sample) -> None:
        """Sends the samples to the owners of the points, and trains there. Collective."""
        before = self._batches()
        inputs = {name: [name] if target == name else [name, target] for name, target in self.targets.items()}
        for name, (x_ND, *target_NE) in self.owners.gather(sample, inputs).items():
            if name not in self.trainers:
                self.trainers[name] = self._new_trainer(name, x_ND.shape[1], *(part.shape[1] for part in target_NE))
            self.trainers[name].add(x_ND, *target_NE)
        self.rows += len(sample)
        self.updated = self._batches() > before

    def _batches(self) -> int:
        """Updates of each trainer so far. A function of the rows, so that ranks know it of trainers they do not own."""
        # Once the buffer is full, a row leaves it for each row that comes
        return max(0, self.rows - self.settings.buffer) // self.settings.batch

    def _new_trainer(self, name: str, width: int, target_width: int | None = None) -> Trainer:
        if problem := self.settings.activation.size_problem(self.settings.latents_of(width)):
            raise ForgeError(f"taps: sink {self.settings.folder}: {name} has {width} features: {problem}")
        # By the point and not by the rank, so that any layout trains the same autoencoder
        seed = f"{self.context.job.job.seed}:{self.settings.folder}:{name}"
        return Trainer(self.settings, width, target_width, seed, self.context.device)

    def metrics(self) -> Mapping[str, float | Tensor]:
        """Returns the metrics of a step with updates, on every rank; collective for such a step."""
        # The same on every rank, so that either all or none take part in the collective below
        if not self.updated:
            return {}
        shared = self.owners.share({name: trainer.metrics() for name, trainer in self.trainers.items()}, METRICS)
        return {f"sae/{self.settings.folder}/{name}": value for name, value in shared.items()}

    def coders(self, *, final: bool = False) -> dict[str, SparseCoder]:
        """Returns the autoencoders as they are now, on every rank; none before their first update. Collective.

        `final`: as they are saved at the end of the run, when rows that are still mixed have been trained on.
        """
        if not (self.rows if final else self._batches()):
            return {}
        trainers = {name: trainer.finished() if final else trainer for name, trainer in self.trainers.items()}
        own = {name: (trainer.width, *trainer.coder.W_dec.shape) for name, trainer in trainers.items()}
        # Ranks that do not own a point have not seen its width.
        known = {name: sizes for part in gather_objects(own) for name, sizes in part.items()}
        coders = {}
        for name, target in self.targets.items():
            if name not in known:  # nothing has passed this point yet, on any rank
                continue
            width, latents, outputs = known[name]
            if self.owners.owns(name):
                coders[name] = trainers[name].coder
            else:
                activation = self.settings.activation.activation(latents)
                coder = SparseCoder(activation, width, latents, None if target == name else outputs)
                coders[name] = coder.to(self.context.device, self.settings.dtype).eval()
            # Every tensor, buffers too, in the order of the state, which is the same on all ranks
            if world_size() > 1:
                for tensor in coders[name].state_dict().values():
                    torch.distributed.broadcast(tensor, self.owners.rank_of[name])
        return coders

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the trainers of this rank, and the number of rows, which is the same on every rank."""
        trained = self.trainers.items()
        own = {f"{name}/{key}": tensor for name, trainer in trained for key, tensor in trainer.state().items()}
        return {**own, "rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the trainers of this rank's points again, with the widths in the state; the number of ranks may differ.

        Raises:
            ForgeError: the checkpoint has other points, or an autoencoder of another size or kind.
        """
        self.rows = state["rows"]
        saved = {name.partition("/")[0] for name, value in state.items() if isinstance(value, Tensor)}
        # In both directions: a new point would start from nothing, and a missing one would be lost without a message
        if saved and (changed := sorted(saved ^ set(self.targets))):
            names = ", ".join(changed)
            raise ForgeError(
                f"taps: sink {self.settings.folder}: the checkpoint has other points; they differ in {names}"
            )
        self.trainers = {}
        for name, own in self.owners.of_rank(state).items():
            width, target_width = own["coder.W_enc"].shape[0], own["coder.W_dec"].shape[1]
            self.trainers[name] = self._new_trainer(name, width, None if self.targets[name] == name else target_width)
            self.trainers[name].load(own)

    def close(self, final: bool) -> None:
        """Trains on the rows left in the buffers and writes the files, if `final`; else does nothing. Collective."""
        if not final:
            return
        for name, trainer in self.trainers.items():
            trainer.finish()
            if self.context.folder is not None:
                figures = trainer.inferred()
                folder = self.context.folder / self.settings.folder / name
                save(trainer.coder, folder, metadata(name, self.targets[name], self.context.job.job.name, figures))
        gather_objects(None)  # no rank continues and reads files that another rank has yet to write


def metadata(name: str, target: str, model: str, figures: Mapping[str, float]) -> dict[str, Any]:
    """The metadata of the training in `cfg.json`, under SAELens' names where it has one."""
    of_target = {} if target == name else {"hook_name_out": target}
    return {
        "model_name": model,
        "hook_name": name,
        **of_target,
        "trained_by": "forge-plugin-sae",
        "last": dict(figures),
    }


def targets_of(settings: SAE, taps: TapsInfo) -> dict[str, str]:
    """Each point and what its autoencoder reconstructs.

    Raises:
        ForgeError: the points cannot be trained on, or a transcoder's target is not among them.
    """
    outputs = [name for name in taps.points if settings.output and name.rpartition(".")[2] == settings.output]
    targets = {}
    for name, info in taps.points.items():
        if info.axes == "pattern":
            raise ForgeError(f"sae: {name} is attention, whose width is the length of the sequence")
        if name in outputs:
            continue
        layer = name.rpartition(".")[0]
        target = f"{layer}.{settings.output}".lstrip(".") if settings.output else name
        if target not in taps.points:
            hint = did_you_mean(target, taps.points)
            raise ForgeError(f"sae: {target}, the output for {name}, is not captured{hint}")
        targets[name] = target
    if not targets:
        raise ForgeError(f"sae: there is no point but the output {settings.output}")
    return targets
