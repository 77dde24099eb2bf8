"""The part of attention that has no parameters: queries, keys and values in, mixed values out.

Shapes: B sequences, S query positions, T key positions, H query heads, K key/value heads, E width of a head,
V width of its values: E or less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from forge_kit.nn.direct_calls import directly_callable
from forge_plugin_transformer.attention_backends import Choice, Kernel
from forge_plugin_transformer.document_backends import DocumentChoice, Way
from forge_plugin_transformer.modules.documents import document_bounds, document_mask, window_mask
from forge_plugin_transformer.modules.gemm_attention import gemm_attention
from forge_plugin_transformer.modules.narrow_values import narrowed, padded
from forge_plugin_transformer.modules.parts import prepare
from forge_plugin_transformer.modules.segment_attention import segment_attention
from forge_plugin_transformer.modules.softmax_attention import WHOLE, one_query_attention, softmax_attention
from forge_plugin_transformer.scoring import PLAIN, Scoring

if TYPE_CHECKING:
    from forge_core.contracts.data import Batch

TORCH_KERNELS: Mapping[Kernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
WITHOUT_GROUPS: frozenset[Kernel] = frozenset({"efficient", "cudnn"})
"""Kernels that need a key/value head for every query head."""


FLASH_ON_CUDA = (torch.bfloat16, torch.float16)


class Prepared(NamedTuple):
    """An entry of the batch that is computed from its `document_ids`."""

    key: str
    make: Callable[[Tensor], Tensor]


PREPARED: Mapping[Way, Prepared] = {
    "mask": Prepared("document_mask", document_mask),
    "varlen": Prepared("document_bounds", document_bounds),
}
"""Batch entry that each way needs."""


@directly_callable
class AttentionCore(nn.Module):
    """Causal attention, within documents where the batch has `document_ids`, by the chosen kernel.

    q (B, S, H, E), k (B, S, K, E), v (B, S, K, V) -> (B, S, H, V). A separate module, so that a stage that
    splits the sequence can replace it; `mixing` returns what the replacement must do in addition to plain attention.
    """

    def __init__(self, choice: Choice, documents: DocumentChoice, scoring: Scoring = PLAIN) -> None:
        super().__init__()
        self.choice = choice
        self.documents = documents
        self.scoring = scoring

    def mixing(self) -> Mapping[str, float]:
        """Returns what differs from plain causal attention, by name: `window`, `scale`, `soft_cap`, `sinks`."""
        return self.scoring.options()

    def prepare(self, batch: Batch) -> Batch:
        """Returns the batch with the entry that `forward` derives from documents, unless it is there already."""
        if "document_ids" not in batch:
            return batch
        want = self._wanted(batch["document_ids"].shape[1])
        if want is None or want.key in batch:
            return batch
        return {**batch, want.key: want.make(batch["document_ids"])}

    def _wanted(self, length: int) -> Prepared | None:
        """Returns the entry for sequences of this length. Layers with another window have another mask."""
        want, window = PREPARED.get(self.documents.way), self.scoring.window_in(length)
        if self.documents.way != "mask" or want is None or not window:
            return want
        return Prepared(f"{want.key} within {window}", partial(document_mask, window=window))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, sinks: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        """`batch` is the result of `prepare`; otherwise every call prepares its own. `sinks` are the heads' (H,).

        `mask` (B, 1, S, T) is a cache's mask, with the cache's keys and values in `k`, `v`; documents are then ignored.
        """
        # Not by the chosen kernel, which may take no mask, and was measured for whole sequences
        if mask is not None:
            return torch_attention(q, k, v, mask, scoring=self.scoring, sinks=sinks)
        if "document_ids" not in batch:
            return self._attend_rows(q, k, v, sinks)
        batch = self.prepare(batch)
        if self.documents.way == "segments":
            return self._attend_segments(q, k, v, batch["document_ids"], sinks)
        if self.documents.way == "varlen":
            return self._attend_bounds(q, k, v, batch["document_bounds"])
        want = self._wanted(q.shape[1])
        assert want is not None
        return self._attend(q, k, v, batch[want.key], sinks)

    def _attend_rows(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend within rows, each one document: without a mask of all pairs, where the kernel can."""
        length, scoring, kernel = q.shape[1], self.scoring, self.choice.kernel
        window = scoring.window_in(length)
        if kernel in ("torch", "flash") and not scoring.soft_cap and (window or scoring.sinks):
            if q.device.type == "cpu":
                return self._attend_segments(q, k, v, None, sinks)
            if q.dtype in FLASH_ON_CUDA and not scoring.sinks:
                # Each row as a document: `varlen_attn` has windows, `scaled_dot_product_attention` has not
                bounds = torch.arange(0, q.shape[0] * length + 1, length, dtype=torch.int32, device=q.device)
                return self._attend_bounds(q, k, v, bounds)
        # `gemm` leaves out the pairs outside of the window by itself
        mask = window_mask(length, window, q.device) if window and kernel != "gemm" else None
        return self._attend(q, k, v, mask, sinks)

    def _attend_segments(
        self, q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor | None, sinks: Tensor | None
    ) -> Tensor:
        kernel: Literal["flash", "gemm"] = "gemm" if self.choice.kernel == "gemm" else "flash"
        return segment_attention(q, k, v, document_ids, kernel, self.scoring, sinks)

    def _attend_bounds(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        from forge_plugin_transformer.modules.varlen_attention import varlen_attention  # brings torch's compiler

        return varlen_attention(q, k, v, bounds, self.scoring)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        if self.choice.kernel == "gemm":
            return gemm_attention(q, k, v, mask, self.scoring, sinks)
        return torch_attention(q, k, v, mask, self.choice.kernel, self.scoring, sinks)

    def extra_repr(self) -> str:
        options = (f"{name}={value}" for name, value in self.mixing().items())
        return ", ".join((f"{self.choice.kernel}, documents={self.documents.way}", *options))


class PluggedCore(AttentionCore):
    """Attention by the module of an `AttentionBackendComponent`, which keeps documents apart itself.

    With a mask, of a cache or of spans, it is torch's, as with every other kernel.
    """

    def __init__(self, attend: nn.Module, name: str, scoring: Scoring = PLAIN) -> None:
        # Nothing reads the way to keep documents apart, nor shows it
        own = DocumentChoice("mask", "by the kernel", matters=False)
        # The name is shown, and no kernel is looked up by it
        super().__init__(Choice(cast("Kernel", name), "set by the job"), own, scoring)
        self.attend = attend

    def prepare(self, batch: Batch) -> Batch:
        """Returns the batch with what the kernel needs."""
        return prepare(self.attend, batch)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, sinks: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        """As `AttentionCore`; the kernel gets everything but a mask."""
        if mask is not None:
            return super().forward(q, k, v, batch, sinks, mask=mask)
        # Padded, as no kernel declares whether it takes values narrower than keys
        mixed: Tensor = self.attend(q, k, padded(v, k, self.choice.kernel), self.prepare(batch), sinks)
        return narrowed(mixed, v.shape[-1])


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kernel: Kernel = "torch",
    scoring: Scoring = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """`scaled_dot_product_attention`, by one of its kernels or (`torch`) the one it chooses.

    q (B, S, H, E), k (B, T, K, E), v (B, T, K, V), mask (B, 1, S, T) or None for causal with S = T -> (B, S, H, V).
    The mask has the window; `WHOLE` hides nothing, for S = 1. Sinks and a cap, which those kernels do
    not have, are computed as they are defined, whatever the kernel.

    Raises:
        ValueError: the flash kernel is set, and it cannot take a mask on this device.
    """
    if not scoring.plain_softmax:
        return softmax_attention(q, k, v, mask, scoring, sinks)
    if mask is not None and _is_grouped_query_on_cpu(q, k):
        return one_query_attention(q, k, v, mask, scoring)
    if mask is WHOLE and kernel == "torch" and q.is_cpu and k.shape == v.shape and k.shape[2] == q.shape[2]:
        # A generated token, for which what follows would take as long as the kernel
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, scale=scoring.given_scale).transpose(1, 2)
    width, v = v.shape[-1], padded(v, k, kernel)
    on_cuda = q.device.type == "cuda"
    if kernel == "flash" and mask is not None and on_cuda:
        raise ValueError("the flash kernel takes no mask (document_ids) on cuda; set attention.backend to another")
    # On CUDA the flash kernel alone takes groups, and it takes neither masks nor float32: torch would fall back to the
    # matrix of all pairs of positions. Of other devices nothing is known.
    if kernel in WITHOUT_GROUPS or (q.device.type != "cpu" and (mask is not None or q.dtype not in FLASH_ON_CUDA)):
        k, v = (tensor.repeat_interleave(q.shape[2] // tensor.shape[2], 2) for tensor in (k, v))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    with _only(kernel):
        how = {"is_causal": mask is None, "scale": scoring.given_scale, "enable_gqa": q.shape[1] != k.shape[1]}
        hidden = None if mask is WHOLE else mask
        out = F.scaled_dot_product_attention(q, k, v, hidden, **how)  # type: ignore[arg-type]
    return narrowed(out.transpose(1, 2), width)


def _is_grouped_query_on_cpu(q: Tensor, k: Tensor) -> bool:
    """Whether this is a generated token for which two products are faster than torch's kernels.

    Where heads share keys, which torch's kernel repeats, they take 0.75 of its time; without groups 1.1 to 1.7.
    """
    if q.shape[2] == k.shape[2] or torch.is_grad_enabled():
        return False
    # Not with 16 bits, in which scores would be rounded before the softmax, as torch's kernels do not.
    return q.shape[1] == 1 and q.device.type == "cpu" and q.dtype.itemsize >= 4


def _only(kernel: Kernel) -> AbstractContextManager[None]:
    return sdpa_kernel(TORCH_KERNELS[kernel]) if kernel in TORCH_KERNELS else nullcontext()
