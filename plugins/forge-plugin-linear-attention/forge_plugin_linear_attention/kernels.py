"""Which kernels compute the recurrence of a mixer; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, NamedTuple

from forge_core.contracts.errors import JobError, Problem

if TYPE_CHECKING:
    import torch

    from forge_core.contracts.contexts import BuildContext

KernelOrAuto = Literal["auto", "torch", "fla"]
Kernel = Literal["torch", "fla"]


class KernelChoice(NamedTuple):
    """A kernel, and the reason for it."""

    kernel: Kernel
    why: str
    matters: bool = True
    """Whether there was a choice, which a run prints: not on a CPU."""

    def described(self) -> Sequence[tuple[str, str, str]]:
        """Returns it as `Model.backend_choices` does."""
        return [("recurrence", self.kernel, self.why)] if self.matters else []


def choose_kernel(kernel: KernelOrAuto, context: BuildContext) -> KernelChoice:
    """Returns `kernel`, or for auto flash-linear-attention's where they run: on a GPU, in half precision.

    Raises:
        JobError: the job sets `fla`, which does not run there.
    """
    on_cpu = context.device.type == "cpu"
    if kernel == "torch":
        return KernelChoice(kernel, "set by the job", matters=not on_cpu)
    obstacle = _obstacle(context.device, context.dtype)
    if kernel == "fla":
        if obstacle:
            problem = f'"fla" does not run: {obstacle}; take "auto" or "torch"'
            raise JobError([Problem("model.attention.kernel", f"{problem} (building {context.path})")])
        return KernelChoice(kernel, "set by the job")
    if obstacle:
        return KernelChoice("torch", obstacle, matters=not on_cpu)
    return KernelChoice("fla", "flash-linear-attention is installed")


def _obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why flash-linear-attention's kernels do not run; empty if they do."""
    if device.type == "cpu":
        return "the device is a CPU"
    if dtype.itemsize != 2:
        return f"its kernels take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return "" if find_spec("fla") else "the package flash-linear-attention is not installed"
