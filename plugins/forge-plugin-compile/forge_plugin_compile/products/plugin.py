"""The plugin `cpu_products`: decides who multiplies, and reports it in the run's summary."""

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
class CPUProducts(Plugin):
    """Matrix products on a CPU by what is faster there than torch's choice, and as exact.

    float32 by oneDNN on AMD processors with AVX-512, unless `train.float32_matmul` asks for less than `"highest"`;
    bfloat16 in float32, rounded once, on x86 processors without AVX-512. Elsewhere it changes nothing.
    """

    resumes_as = "safe"  # the same products, rounded in another order

    @hookimpl
    def forge_configure_backend(self, job: Job, device: torch.device) -> Callable[[], None] | None:
        import torch

        from forge_kit.nn.products import multiply_by
        from forge_plugin_compile.products.bfloat16 import InFloat32
        from forge_plugin_compile.products.dispatch import Way, take_over
        from forge_plugin_compile.products.onednn import ByOneDNN

        if device.type != "cpu":
            return None
        ways: list[Way] = []
        if _exactly(job) and ByOneDNN.helps():
            ways.append(ByOneDNN())
            multiply_by("oneDNN", torch.float32)
        if InFloat32.helps():
            ways.append(InFloat32())
            multiply_by("BLAS", torch.bfloat16)
        take_over(*ways)

        def give_back() -> None:
            take_over()
            multiply_by(None, torch.float32, torch.bfloat16)

        return give_back

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Reports who multiplies in a run on a CPU; elsewhere, and in float64, there is no choice."""
        import torch

        from forge_kit.nn.products import multiplied_by
        from forge_plugin_compile.products.bfloat16 import InFloat32

        if context.device.type != "cpu":
            return
        if context.dtype == torch.bfloat16:
            if InFloat32.helps():
                yield "products", "float32, rounded once", "torch multiplies bfloat16 number by number without AVX-512"
            else:
                yield "products", "bfloat16", "torch has kernels for it on this processor"
        elif context.dtype == torch.float32 and _exactly(context.job):
            if multiplied_by(torch.float32) == "oneDNN":
                yield "products", "oneDNN", "MKL does not use the AVX-512 of this AMD processor; as exact: tried"
            else:
                yield "products", "BLAS", "no AMD processor with AVX-512, or oneDNN does not keep float32 there"


def _exactly(job: Job) -> bool:
    return job.train.float32_matmul not in ("high", "medium")
