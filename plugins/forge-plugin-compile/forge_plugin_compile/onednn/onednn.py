"""The plugin `onednn`: decides whether oneDNN computes, and reports it in the run's summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from attrs import define

from forge_core import Plugin, hookimpl

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext
    from forge_core.job import Job


@define(kw_only=True, slots=False)
class OneDNN(Plugin):
    """float32 matrix products by oneDNN where that is faster than BLAS and as exact: on AMD processors with AVX-512.

    Elsewhere, and with a `train.float32_matmul` other than `"highest"`, it changes nothing.
    """

    resumes_as = "safe"  # the same products, rounded in another order

    @hookimpl
    def forge_configure_backend(self, job: Job, device: torch.device) -> Callable[[], None] | None:
        from forge_plugin_compile.onednn.products import give_back, is_faster, take_over

        if not _applies(job, device) or not is_faster():
            return None
        take_over()
        return give_back

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Reports the library of products in a float32 run on a CPU; elsewhere there is no choice."""
        import torch

        from forge_kit.nn.products import multiplied_by

        if not _applies(context.job, context.device) or context.dtype != torch.float32:
            return
        if multiplied_by(torch.float32) == "oneDNN":
            yield "products", "oneDNN", "MKL does not use the AVX-512 of this AMD processor; as exact: tried"
        else:
            yield "products", "BLAS", "no AMD processor with AVX-512, or oneDNN does not keep float32 there"


def _applies(job: Job, device: torch.device) -> bool:
    return device.type == "cpu" and job.train.float32_matmul not in ("high", "medium")
