"""Training one sparse autoencoder, or transcoder, on rows of a stream.

N rows, D features of the input, E of the target, F latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from forge_core.contracts.errors import ForgeError
from forge_plugin_sae.mixing import MixingBuffer, generator
from forge_plugin_sae.model import SparseCoder
from forge_plugin_sae.quality import Quality

if TYPE_CHECKING:
    from forge_plugin_sae.settings import Training


class Trainer:
    """A `SparseCoder`, its optimizer, its mixing buffer, and statistics of its latents.

    Everything is a function of the settings, the seed and the rows in their order.
    """

    def __init__(
        self, settings: Training, width: int, target_width: int | None, seed: str, device: torch.device
    ) -> None:
        """Draw the initial weights.

        Args:
            settings: of the job.
            width: D.
            target_width: E, of a transcoder; None: an autoencoder.
            seed: seeds weights and the order of rows: the job's seed and the name of the point.
            device: of weights and buffer.
        """
        self.settings, self.width, self._seed = settings, width, seed
        self.dtype = settings.dtype
        latents = settings.latents_of(width)
        self.coder = SparseCoder(settings.activation.activation(latents), width, latents, target_width)
        self.coder.to(device, self.dtype)
        self.coder.draw(generator(f"{seed}:weights"))
        self.parameters = dict(self.coder.named_parameters())
        self.optimizer = torch.optim.Adam(self.parameters.values(), settings.rate_of(latents), settings.betas)
        self.buffer = MixingBuffer(settings.buffer, width + (target_width or 0), f"{seed}:order", device, self.dtype)
        self.waiting: Tensor = self.buffer.rows[:0]
        """Rows that have left the buffer, and are not yet a batch."""
        self.updates, self.rows = 0, 0
        self.idle_F = torch.zeros(latents, dtype=torch.int64, device=device)
        """Rows since each latent was last active."""
        self.quality = Quality(self.coder.W_dec.shape[1], device)
        """Over the batches since the last `metrics`."""
        self._newest: Tensor | None = None
        """The rows of the last update."""

    # --- the stream ----------------------------------------------------------------------------------------------

    def add(self, x_ND: Tensor, target_NE: Tensor | None = None) -> None:
        """Take in rows, and train on as many once the buffer is full."""
        parts = [x_ND] if target_NE is None else [x_ND, target_NE]
        for leaving in self.buffer.put(torch.cat([part.flatten(1).to(self.dtype) for part in parts], 1)):
            self._queue(leaving)

    def finish(self) -> None:
        """Train on the rows that are left; the last batch may be smaller."""
        self._queue(self.buffer.drain())
        if len(self.waiting):
            self._train(self.waiting)
        self.waiting = self.waiting[:0]

    @torch.enable_grad()  # evaluations ask, which need no gradients
    def finished(self) -> Trainer:
        """Returns what this would be after `finish`, and leaves it as it is."""
        transcodes = self.coder.transcodes
        target_width = self.coder.W_dec.shape[1] if transcodes else None
        copy = Trainer(self.settings, self.width, target_width, self._seed, self.buffer.rows.device)
        # Clones, as `finish` trains the copy, and must not move the tensors of this trainer
        copy.load({name: tensor.clone() for name, tensor in self.state().items()})
        copy.finish()
        return copy

    def _queue(self, rows: Tensor) -> None:
        batches = list(torch.cat([self.waiting, rows]).split(self.settings.batch))
        # A copy: a view would keep the whole of what it is a part of
        self.waiting = batches.pop().clone() if batches and len(batches[-1]) < self.settings.batch else rows[:0]
        for batch in batches:
            self._train(batch)

    def _train(self, rows: Tensor) -> None:
        self._newest = rows
        x_ND, target_NE = self._divide(rows)
        if self.updates == 0:
            self._begin(x_ND, target_NE)
        self.update(x_ND * self.coder.scale_in, target_NE * self.coder.scale_out)

    def _divide(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        # The same columns twice for an autoencoder: its rows are input and target in one
        return rows[:, : self.width], rows[:, -self.coder.W_dec.shape[1] :]

    def _begin(self, x_ND: Tensor, target_NE: Tensor) -> None:
        """Set the scales, by the buffer while it is full, and the bias, by the first batch."""
        if self.settings.normalise:
            held = self._divide(self.buffer.rows) if self.buffer.is_full else (x_ND, target_NE)
            for scale, part in zip((self.coder.scale_in, self.coder.scale_out), held, strict=True):
                # Clamped, since activations that are all zero have no norm to divide by
                scale.copy_(part.square().sum(-1).mean().clamp(min=torch.finfo(self.dtype).tiny).rsqrt())
        self.start_from(target_NE * self.coder.scale_out)

    @torch.no_grad()
    def start_from(self, target_NE: Tensor) -> None:
        """Put b_dec at the geometric median of scaled targets (Gao et al. 2024, section A.1)."""
        self.coder.b_dec.copy_(geometric_median(target_NE))

    # --- one update ----------------------------------------------------------------------------------------------

    def update(self, x_ND: Tensor, target_NE: Tensor) -> Tensor:
        """One update on scaled rows; returns the loss before it, on the device."""
        coder, settings = self.coder.train(), self.settings
        pre_NF = coder.pre_activations(x_ND)
        latents_NF = coder.activation(pre_NF)
        error_NE = target_NE - coder.decode(latents_NF)
        self._count(latents_NF)
        # Summed over features: penalties and revival are relative to the squared norm of a row
        loss = error_NE.square().sum(-1).mean() + coder.activation.penalty(pre_NF, latents_NF)
        if settings.activation.revival and self.rows >= settings.dead_after:  # none can be dead before that
            loss = loss + settings.activation.revival * self._revival_loss(pre_NF, error_NE.detach())
        loss.backward()
        self._step()
        self.quality.add(target_NE, error_NE.detach(), latents_NF.detach(), loss.detach())
        coder.eval()
        return loss.detach()

    def _count(self, latents_NF: Tensor) -> None:
        self.rows += len(latents_NF)
        self.idle_F += len(latents_NF)
        self.idle_F.masked_fill_((latents_NF != 0).any(0), 0)

    def _revival_loss(self, pre_NF: Tensor, error_NE: Tensor) -> Tensor:
        """The squared error of dead latents as an explanation of `error_NE`, over the variance of that.

        Gao et al. 2024, section A.2, normalised as in the code that they published.
        """
        dead_F = self.dead
        most = min(max(error_NE.shape[1] // 2, 1), len(dead_F))
        # Latents that are alive take part with the value 0, which explains nothing and has no gradient: so the number
        # that topk needs on the host does not depend on how many are dead
        values, indices = pre_NF.relu().masked_fill(~dead_F, 0).topk(most, dim=-1, sorted=False)
        dead_NF = torch.zeros_like(pre_NF).scatter(-1, indices, values)
        left = (error_NE - dead_NF @ self.coder.W_dec).square().sum(-1).mean()
        variance = (error_NE - error_NE.mean(0)).square().sum(-1).mean()
        return torch.where(dead_F.any() & (variance > 0), left / variance, 0.0).to(left.dtype)

    @torch.no_grad()
    def _step(self) -> None:
        """Adam within decoder rows of unit norm: what a gradient has along its row would only change the norm."""
        decoder = self.coder.W_dec
        assert decoder.grad is not None
        # Before clipping, so that the norm is of what moves the weights
        decoder.grad -= (decoder.grad * decoder).sum(-1, keepdim=True) * decoder
        if self.settings.grad_clip_norm:
            clip_grad_norm_(self.parameters.values(), self.settings.grad_clip_norm)
        for group in self.optimizer.param_groups:
            # Counted from 1, so that the first update moves the weights
            warm = min(1.0, (self.updates + 1) / max(self.settings.warmup, 1))
            group["lr"] = self.settings.rate_of(len(self.idle_F)) * warm
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Adam leaves the sphere even though the gradient is tangential, as it scales each element by itself
        decoder.div_(decoder.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(decoder.dtype).tiny))
        self.updates += 1

    @property
    def dead(self) -> Tensor:
        """(F) whether a latent has been active in none of the last `dead_after` rows."""
        return self.idle_F >= self.settings.dead_after

    def metrics(self) -> dict[str, Tensor]:
        """Scalars on the device, over the batches since the last call; none without a batch."""
        if not self.quality.rows:
            return {}
        metrics = self.quality.metrics()
        self.quality.clear()
        return {**metrics, "dead": self.dead.double().mean(), "updates": torch.tensor(float(self.updates))}

    @torch.no_grad()
    def inferred(self) -> dict[str, float]:
        """Figures of the last batch with latents as they are after training, which may be others than in it."""
        assert self._newest is not None
        x_ND, target_NE = self._divide(self._newest)
        latents_NF, target_NE = self.coder.encode(x_ND), target_NE * self.coder.scale_out
        quality = Quality(target_NE.shape[1], target_NE.device)
        quality.add(target_NE, target_NE - self.coder.decode(latents_NF), latents_NF)
        figures = {**quality.metrics(), "dead": self.dead.double().mean()}
        del figures["loss"]
        return {name: float(value) for name, value in figures.items()} | {"updates": float(self.updates)}

    # --- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """All that the next update depends on."""
        saved = {f"coder.{name}": tensor.detach() for name, tensor in self.coder.state_dict().items()}
        for name, parameter in self.parameters.items():
            saved |= {f"adam.{name}.{slot}": value for slot, value in self.optimizer.state[parameter].items()}
        saved |= {f"buffer.{name}": tensor for name, tensor in self.buffer.state().items()}
        # Full batches of zeros behind the waiting rows: a tensor without rows cannot be saved
        waiting = self.waiting.new_zeros(self.settings.batch, self.buffer.rows.shape[1])
        waiting[: len(self.waiting)] = self.waiting
        counts = torch.tensor([len(self.waiting), self.updates, self.rows, self.quality.rows])
        return {**saved, "waiting": waiting, "counts": counts, "idle": self.idle_F, "quality": self.quality.sums}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned.

        Raises:
            ForgeError: it is the state of another kind of autoencoder, or of other sizes.
        """
        self.buffer.load(_below(state, "buffer."))
        try:
            self.coder.load_state_dict(_below(state, "coder."))
        except RuntimeError as error:
            raise ForgeError(f"the autoencoder in the checkpoint is another than the job's: {error}") from error
        for name, parameter in self.parameters.items():
            slots = _below(state, f"adam.{name}.")
            # Adam counts its steps on the CPU
            own = {slot: value.to("cpu" if slot == "step" else parameter.device) for slot, value in slots.items()}
            if own:
                # Copied: the optimizer changes its state in place, and the one given is the caller's
                self.optimizer.state[parameter] = {slot: value.clone() for slot, value in own.items()}
        waiting, self.updates, self.rows, self.quality.rows = state["counts"].tolist()
        self.waiting = state["waiting"][:waiting].to(self.buffer.rows)
        self.idle_F.copy_(state["idle"])
        self.quality.sums.copy_(state["quality"])


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def geometric_median(points_ND: Tensor, iterations: int = 100, tolerance: float = 1e-5) -> Tensor:
    """The point (D) with the smallest sum of distances to N points, by Weiszfeld's iteration from their mean."""
    guess = points_ND.mean(0)
    for _ in range(iterations):
        # A point that the guess has met would have infinite weight
        weights = 1 / (points_ND - guess).norm(dim=1).clamp(min=torch.finfo(guess.dtype).eps)
        new = (weights[:, None] * points_ND).sum(0) / weights.sum()
        moved, guess = (new - guess).norm(), new
        if moved < tolerance:
            break
    return guess
