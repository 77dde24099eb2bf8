"""Twenty mistakes of code for GPUs, each a function that makes one: `python tests/gpu/faults.py` counts who finds them.

Each takes the device, and has the mistake in the line that is marked `# fault`. On a CPU all run through.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FAULTS: list[Callable[[torch.device], object]] = []


def fault(function: Callable[[torch.device], object]) -> Callable[[torch.device], object]:
    """Add a mistake to the list."""
    FAULTS.append(function)
    return function


def line_of(function: Callable[..., object]) -> int:
    """The number of the line that is marked."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if "# fault" in line)


def _ones(device: torch.device) -> Tensor:
    return torch.ones(8, 8, device=device)


@fault
def a_tensor_made_on_the_host(device: torch.device) -> object:
    return _ones(device) + torch.arange(8.0)  # fault


@fault
def a_mask_made_on_the_host(device: torch.device) -> object:
    return _ones(device).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), 0.0)  # fault


@fault
def a_product_with_a_parameter_that_did_not_move(device: torch.device) -> object:
    layer = nn.Linear(8, 8)
    return layer(_ones(device))  # fault


@fault
def an_item(device: torch.device) -> object:
    return _ones(device).sum().item()  # fault


@fault
def a_float(device: torch.device) -> object:
    return 2.0 * float(_ones(device).mean())  # fault


@fault
def a_condition_on_a_value(device: torch.device) -> object:
    return 1 if _ones(device).sum() > 0 else 0  # fault


@fault
def a_loop_over_values(device: torch.device) -> object:
    return [length + 1 for length in torch.arange(4, device=device).tolist()]  # fault


@fault
def a_mask_as_an_index(device: torch.device) -> object:
    x = _ones(device)
    return x[x > 0]  # fault


@fault
def nonzero(device: torch.device) -> object:
    return torch.nonzero(_ones(device))  # fault


@fault
def a_comparison_of_tensors(device: torch.device) -> object:
    return torch.equal(_ones(device), _ones(device))  # fault


@fault
def repetitions_without_a_size(device: torch.device) -> object:
    return torch.arange(3, device=device).repeat_interleave(torch.ones(3, dtype=torch.long, device=device))  # fault


@fault
def an_index_on_the_host(device: torch.device) -> object:
    return _ones(device)[torch.tensor([1, 2])]  # fault


@fault
def a_number_sent_each_step(device: torch.device) -> object:
    return _ones(device) * torch.tensor([0.5], device=device)  # fault


@fault
def a_copy_that_blocks(device: torch.device) -> object:
    return torch.ones(8).to(device)  # fault


@fault
def a_metric_read_each_step(device: torch.device) -> object:
    norm = nn.utils.get_total_norm([_ones(device)])
    return f"norm {norm:.3f}"  # fault


@fault
def a_generator_of_the_host(device: torch.device) -> object:
    return torch.randn(8, device=device, generator=torch.Generator().manual_seed(0))  # fault


@fault
def a_copy_read_before_it_has_arrived(device: torch.device) -> object:
    copied = _ones(device).to("cpu", non_blocking=True)
    return copied.sum()  # fault


@fault
def pinned_memory_written_while_it_is_sent(device: torch.device) -> object:
    batch = torch.ones(8, pin_memory=device.type != "cpu")
    sent = batch.to(device, non_blocking=True)
    batch.fill_(2.0)  # fault
    return sent


@fault
def a_side_stream_that_did_not_wait(device: torch.device) -> object:
    module: Any = torch.get_device_module(device)
    x, side = _ones(device), module.Stream()
    with module.stream(side):
        return x * 2  # fault


@fault
def memory_freed_while_a_side_stream_reads_it(device: torch.device) -> object:
    module: Any = torch.get_device_module(device)
    x, side = _ones(device), module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        y = x * 2  # fault
    del x
    return _ones(device), y


def found_on_the_device() -> dict[str, str]:
    """For each mistake, where the pretended device says that it is; empty if it says nothing."""
    from forge_testing import pretend

    found = {}
    for function in FAULTS:
        pretend.reset_waits()
        try:
            function(torch.device(pretend.NAME, 0))
            places = [where for _, where in pretend.waits()]
        except RuntimeError as error:
            places = [str(error)]
        here = f"{__file__}:{line_of(function)}"
        found[function.__name__] = here if any(place.startswith(here) for place in places) else ""
    return found


def found_on_meta() -> list[str]:
    """The mistakes that end in an error on the meta device, which has shapes and no values."""
    found = []
    for function in FAULTS:
        try:
            function(torch.device("meta"))
        except Exception as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
            if (
                line_of(function) in lines
            ):  # elsewhere it ends right programs, too: it copies nothing, and has no streams
                found.append(function.__name__)
    return found


if __name__ == "__main__":
    from forge_testing.pretend import on_device

    meta = found_on_meta()
    for name, place in on_device(found_on_the_device).items():
        sys.stdout.write(
            f"{name:45} {'found' if place else 'not found':10} meta: {'found' if name in meta else 'not found'}\n"
        )
