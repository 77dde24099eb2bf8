"""How well latents reconstruct their target, over many rows. N rows, E features, F latents."""

from __future__ import annotations

import torch
from torch import Tensor


class Quality:
    """Sums over rows, from which the figures follow exactly, however rows were divided into batches."""

    def __init__(self, width: int, device: torch.device | str) -> None:
        self.width, self.rows = width, 0
        # float64: the variance below is a difference of sums, which may cancel
        self.sums = torch.zeros(width + 4, dtype=torch.float64, device=device)
        """Of the target (E), its squares, the squared error, active latents, and the loss."""

    def add(self, target_NE: Tensor, error_NE: Tensor, latents_NF: Tensor, loss: Tensor | None = None) -> None:
        """Add rows; `loss` is their mean loss."""
        self.rows += len(target_NE)
        target, error = target_NE.double(), error_NE.double()
        self.sums[: self.width] += target.sum(0)
        active = (latents_NF != 0).sum().double()
        total = torch.zeros_like(active) if loss is None else loss.double() * len(target)
        self.sums[self.width :] += torch.stack([target.square().sum(), error.square().sum(), active, total])

    def metrics(self) -> dict[str, Tensor]:
        """`explained_variance`, `l0` (active latents of a row) and `loss`, on the device.

        Explained variance is 1 - sum |y - ŷ|² / sum |y - ȳ|², over rows and features, ȳ the mean of all rows: 0 for
        the mean as reconstruction, 1 for a perfect one. A target without variance has 0.
        """
        squares, errors, active, loss = self.sums[self.width :]
        variance = squares - self.sums[: self.width].square().sum() / max(self.rows, 1)
        explained = torch.where(variance > 0, 1 - errors / variance, 0.0)
        rows = max(self.rows, 1)
        return {"explained_variance": explained, "l0": active / rows, "loss": loss / rows}

    def clear(self) -> None:
        """Reset the sums."""
        self.rows = 0
        self.sums.zero_()
