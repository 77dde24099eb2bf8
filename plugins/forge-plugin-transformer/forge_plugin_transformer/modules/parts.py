"""Declarations of a model, combined from the declarations of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from forge_core.contracts.data import Batch
from forge_core.contracts.errors import ForgeError
from forge_core.contracts.model import Role


class InTwoSteps(Protocol):
    """A part of a block that computes `finish(project(x, batch), x, batch, *cache)`: `Block` calls it as any other.

    Between the two steps a Canon layer may mix positions of what is projected. A component whose modules are so
    declares `in_two_steps = True`.
    """

    def project(self, x: Tensor, batch: Batch) -> Sequence[Tensor]:
        """(B, S, D) -> tensors (B, S, …). A tensor-parallel rank, with a plan for them, has some features of each."""
        ...

    def finish(self, projected: Sequence[Tensor], x: Tensor, batch: Batch, *cache: Any) -> Tensor:
        """Tensors like those of `project`, and what the part reads -> (B, S, D)."""
        ...

    def projected_widths(self) -> Mapping[str, int]:
        """Names what `project` returns, in that order, with the number of features of each, on all ranks together."""
        ...


def _ask(part: nn.Module, method: str, default: Any, *args: Any) -> Any:
    """Returns the result of a method of `Model` that a part may have, with names relative to itself."""
    # Any module may be a part, so there is no base class of them: one of torch's as a feed-forward, for example.
    declared = getattr(part, method, None)
    return default if declared is None else declared(*args)


def prepare(part: nn.Module, batch: Batch) -> Batch:
    """Returns the batch with the entries that the part needs."""
    prepared: Batch = _ask(part, "prepare", batch, batch)
    return prepared


def prepare_decode(part: nn.Module, batch: Batch, cache: Any) -> Batch:
    """Returns the batch of the next positions with the entries that the part needs, beside its cache."""
    prepared: Batch = _ask(part, "prepare_decode", batch, batch, cache)
    return prepared


def flops(part: nn.Module, seq_len: int) -> float:
    """Returns FLOPs a token, forward and backward: the part's own count, else 6 an element of its matrices."""
    # 2 an element in the forward pass, 4 in the backward pass
    own: float | None = _ask(part, "flops", None, seq_len)
    return 6.0 * sum(p.numel() for p in part.parameters() if p.ndim > 1) if own is None else own


def roles(name: str, part: nn.Module) -> dict[str, Role]:
    """Returns the role of each parameter below `name`: the part's own answer, else by shape."""
    declared = _ask(part, "parameter_roles", {})
    return {f"{name}.{key}": declared.get(key) or _role(key, p.ndim) for key, p in part.named_parameters()}


def _role(name: str, dimensions: int) -> Role:
    # By name first: the biases of a stack have as many dimensions as a matrix
    if name.endswith("bias"):
        return "bias"
    shapes: Mapping[int, Role] = {1: "norm", 2: "matrix"}
    return shapes.get(dimensions, "stack")


def tensor_parallel_plan(name: str, part: nn.Module) -> dict[str, Any]:
    """Returns the part's plan, with module names below `name`; "" is the part itself."""
    plan = _ask(part, "tensor_parallel_plan", {})
    return {f"{name}.{key}" if key else name: way for key, way in plan.items()}


def of_positions(name: str, part: nn.Module) -> dict[str, str]:
    """Returns the plan of a part that computes each position by itself: whole parameters, on a rank's positions."""
    own = tensor_parallel_plan(name, part)
    inner = (key for key, module in part.named_modules(prefix=name) if [*module.parameters(recurse=False)])
    return own or dict.fromkeys(inner, "sequence")


def sequence_mixers(name: str, part: nn.Module) -> dict[str, int]:
    """Returns the part's sequence mixers, with names below `name`, and their numbers of key/value heads."""
    mixers = _ask(part, "sequence_mixers", {})
    return {f"{name}.{key}": heads for key, heads in mixers.items()}


def expert_stacks(name: str, part: nn.Module) -> list[str]:
    """Returns the part's stacks of experts, with names below `name`."""
    return [f"{name}.{key}" for key in _ask(part, "expert_stacks", ())]


def last_parameters(part: nn.Module, name: str) -> list[str]:
    """Names the parameters of the child `name`, a linear map or a norm whose output they are proportional to.

    Raises:
        ForgeError: a constant is added to its gain, so that the output is not proportional to what is trained.
    """
    child = part.get_submodule(name)
    if getattr(child, "offset", 0):
        raise ForgeError(f"the gain of {name} has an offset, so that no parameter is proportional to its output")
    return [f"{name}.{key}" for key, _ in child.named_parameters()]


def stream_writers(name: str, part: nn.Module) -> list[str]:
    """Returns the parameters that a part's output is proportional to, with names below `name`.

    Raises:
        ForgeError: the part does not name them.
    """
    declared = _ask(part, "stream_writers", None)
    if declared is None:
        message = f"{name} is a {type(part).__name__}, which does not name the parameters that its output is"
        raise ForgeError(f"{message} proportional to, by a method `stream_writers`")
    return [f"{name}.{key}" for key in declared]


def unit_scale(name: str, part: nn.Module, seq_len: int) -> float:
    """Returns the factor by which the input of a part's `stream_writers` has a root mean square of 1 at the start.

    Raises:
        ForgeError: the part does not state it.
    """
    declared: float | None = _ask(part, "unit_scale", None, seq_len)
    if declared is None:
        message = f"{name} is a {type(part).__name__}, which does not state the size of its features at the start"
        raise ForgeError(f"{message}, by a method `unit_scale`")
    return declared


def float8_exempt(name: str, part: nn.Module) -> list[str]:
    """Returns the part's exemptions, with module names below `name`."""
    return [f"{name}.{key}" for key in _ask(part, "float8_exempt", ())]


def backend_choices(part: nn.Module, seq_len: int) -> Sequence[tuple[str, str, str]]:
    """Returns the part's choices of kernels: (what, choice, why)."""
    choices: Sequence[tuple[str, str, str]] = _ask(part, "backend_choices", (), seq_len)
    return choices
