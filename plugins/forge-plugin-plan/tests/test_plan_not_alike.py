"""What shows that the micro-batches of a step may differ, so that none repeats another: small steps without a job."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_plugin_plan.fake_world import BroadcastLog, fake_world
from forge_plugin_plan.meter import Meter
from forge_plugin_plan.passages import NotAlike
from forge_plugin_plan.repetition import Repetition
from forge_testing.refusals import naming

COUNT = 7
"""Micro-batches of a step: 0, 1, 5 and 6 are played."""


class Section(nn.Module):
    """A section that computes what it is given."""

    def __init__(self, compute: Callable[[Section, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(4, 4), compute
        self.head = nn.Linear(4, 4)
        self.held: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.compute(self, x)


class Step:
    """What a micro-batch does in a step."""

    def __init__(self, compute: Callable[[Section, Tensor], Any] | None = None) -> None:
        self.section, self.loss = Section(compute or (lambda own, x: own.linear(x))), SimpleNamespace(around=None)
        self.inputs = [torch.ones(2, 4) for _ in range(COUNT)]
        """Tensors that no watched operation has made."""

    def run(self, micro_batch: Callable[[Step, int], object]) -> Meter:
        meter = Meter()
        repetition = Repetition(meter, self.section, self.loss, COUNT, lambda text: None)  # type: ignore[arg-type]
        with meter.watching(), repetition.applied():
            for number in range(COUNT):
                micro_batch(self, number)
        return meter


def plain(step: Step, number: int) -> None:
    step.section(torch.ones(2, 4)).sum().backward()


def with_loss(loss: Callable[[int, Tensor], Tensor]) -> Callable[[Step, int], None]:
    def micro_batch(step: Step, number: int) -> None:
        hidden = step.section(torch.ones(2, 4))
        step.loss.around(lambda: loss(number, hidden), (hidden,)).backward()

    return micro_batch


def holding(step: Step, number: int) -> None:
    x = torch.ones(2, 4)
    out = step.section(x)
    out.sum().backward()


def two_sections(step: Step, number: int) -> None:
    first, second = step.section(torch.ones(2, 4)), step.section(torch.ones(3, 4))
    first.sum().backward()
    second.sum().backward()


ALIKE = {
    "outputs that nobody holds": plain,
    "outputs that are held": holding,
    "two sections": two_sections,
    "a loss": with_loss(lambda number, hidden: (hidden * 2).sum()),
}


@pytest.mark.parametrize("name", ALIKE)
def test_equal_micro_batches_are_repeated_with_the_figures_of_a_whole_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step()
    repeated = step.run(ALIKE[name])
    assert step.section.calls == (8 if name == "two sections" else 4)
    monkeypatch.setattr(Repetition, "_call", lambda self, what, play, arguments: play())
    whole = Step().run(ALIKE[name])
    assert repeated.storages.memory() == whole.storages.memory()
    assert (repeated.flops, repeated.storages.kept) == (whole.flops, whole.storages.kept)


def test_two_outputs_may_have_one_gradient() -> None:
    def micro_batch(step: Step, number: int) -> None:
        first, second = step.section(torch.ones(2, 4))
        (first.sum() + second.sum()).backward()

    step = Step(lambda own, x: (own.linear(x), own.linear(x) * 2))
    step.run(micro_batch)
    assert step.section.calls == 4


def keeps_more(own: Section, x: Tensor) -> Tensor:
    own.held.append(x * 2)
    return own.linear(x)


def keeps_another(own: Section, x: Tensor) -> Tensor:
    """The second call keeps for its backward pass what the first has made."""
    own.held = own.held or [x * 2]
    return own.linear(x) * own.held[0] if own.calls == 2 else own.linear(x)


COMPUTE: dict[str, Callable[[Section, Tensor], Any]] = {
    "an output that is no tensor": lambda own, x: (own.linear(x), 3),
    "an output that is a part of another tensor": lambda own, x: x,
    "outputs that take no part in the backward pass": lambda own, x: x + 1,
    "an output that takes no part in the backward pass": lambda own, x: (own.linear(x), x + 1),
    "a storage that is larger than its tensor": lambda own, x: own.linear(x)[:1],
    "micro-batches that leave something in memory": keeps_more,
    "a storage that is no input is used in another way than before": keeps_another,
}


@pytest.mark.parametrize("reason", COMPUTE)
def test_a_section_that_cannot_be_repeated(reason: str) -> None:
    def micro_batch(step: Step, number: int) -> None:
        out = step.section(torch.ones(2, 4))
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    with pytest.raises(NotAlike, match=f"^{reason}$"):
        Step(COMPUTE[reason]).run(micro_batch)


def in_parts(step: Step, number: int) -> None:
    torch.autograd.grad(step.section(torch.ones(2, 4)).sum(), step.section.linear.weight)


def unseen(step: Step, number: int) -> None:
    out = step.section(torch.ones(2, 4))
    if number != COUNT - 2:
        out.sum().backward()


def through_several(step: Step, number: int) -> None:
    (step.section(torch.ones(2, 4)).sum() + step.section(torch.ones(3, 4)).sum()).backward()


def of_no_leaf(step: Step, number: int) -> None:
    step.section(torch.ones(2, 4, requires_grad=True) * 2).sum().backward()


def not_each(step: Step, number: int) -> None:
    step.section(torch.ones(2 if number < COUNT - 1 else 3, 4)).sum().backward()


def followed_in_some(step: Step, number: int) -> None:
    step.section(step.inputs[1 if number == 3 else number]).sum().backward()


def grows_a_head(step: Step, number: int) -> None:
    """The loss is played, and the third micro-batch makes another gradient of the head."""
    if number == 2:
        step.section.head.weight.grad = None
    step.section.head(step.section(torch.ones(2, 4))).sum().backward()


STEPS = {
    "a backward pass in parts": in_parts,
    "a backward pass that is not seen": unseen,
    "a backward pass through several sections": through_several,
    "an input that is no leaf": of_no_leaf,
    "a section that is not called once for each micro-batch": not_each,
    "inputs that are followed only in some micro-batches": followed_in_some,
    "a backward pass of the loss that leaves something in memory": grows_a_head,
}


@pytest.mark.parametrize("reason", STEPS)
def test_a_step_that_cannot_be_repeated(reason: str) -> None:
    with pytest.raises(NotAlike, match=f"^{reason}$"):
        Step().run(STEPS[reason])


def test_an_input_that_is_freed_before_the_backward_pass() -> None:
    def micro_batch(step: Step, number: int) -> None:
        x = torch.ones(2, 4) * 1
        out = step.section(x)
        del x
        out.sum().backward()

    with pytest.raises(NotAlike, match="freed"):
        Step(lambda own, x: own.linear(torch.ones(2, 4)) + x).run(micro_batch)


def test_an_output_whose_gradient_is_not_always_there() -> None:
    def micro_batch(step: Step, number: int) -> None:
        first, second = step.section(torch.ones(2, 4))
        total = (first * 2).sum()
        (total if number == 3 else total + (second * 3).sum()).backward()

    with pytest.raises(NotAlike, match="other gradients of outputs"):
        Step(lambda own, x: (own.linear(x), own.linear(x) * 2)).run(micro_batch)


def test_a_loss_that_only_later_cannot_be_repeated() -> None:
    """One that cannot be from the beginning is played in all micro-batches."""
    step = Step()
    step.run(with_loss(lambda number, hidden: hidden[0, 0]))
    assert step.section.calls == 4
    with pytest.raises(NotAlike, match="an output that is a part of another tensor"):
        Step().run(with_loss(lambda number, hidden: (hidden * 2).sum() if number == 0 else hidden[0, 0]))


def test_a_loss_beside_which_its_input_is_used() -> None:
    def micro_batch(step: Step, number: int) -> None:
        hidden = step.section(torch.ones(2, 4))
        step.loss.around(lambda: (hidden * 2).sum(), (hidden,))
        (hidden * 3).sum().backward()

    with pytest.raises(NotAlike, match="a loss whose input is used elsewhere"):
        Step().run(micro_batch)


def test_a_gradient_of_an_input_that_is_a_part_of_another_tensor() -> None:
    """That of a sum is one number, as often as there are elements."""
    with pytest.raises(NotAlike, match="a gradient of an input"):
        Step().run(with_loss(lambda number, hidden: hidden.sum()))


def test_a_collective_that_is_not_known_is_named() -> None:
    with pytest.raises(ForgeError, match=naming("c10d.scatter_.default")):
        Meter()._communicate(torch.ops.c10d.scatter_.default, (), None, [])
    Meter()._communicate(torch.ops.c10d.barrier.default, (), None, [])


def test_a_process_of_a_real_world_makes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ForgeError, match=naming("process group")), fake_world(2, 0, BroadcastLog(), pipelined=False):
        pass
