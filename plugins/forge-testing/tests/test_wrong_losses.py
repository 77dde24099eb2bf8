"""What the suite of losses says of wrong ones."""

from __future__ import annotations

import pytest
import torch
from attrs import frozen

from forge_core.contracts.components import LossComponent
from forge_core.losses import CrossEntropy, cross_entropy_loss
from forge_testing.refusals import lacks
from forge_testing.suites import LossSuite

pytestmark = pytest.mark.thorough


def component_of(change):
    """The core's cross-entropy, whose output and inputs `change(right, head, hidden, batch)` alters."""
    right = cross_entropy_loss(None)

    @frozen(kw_only=True)
    class Wrong(LossComponent):
        def build(self, context):
            return lambda head, hidden, batch: change(right, head, hidden, batch)

    return Wrong()


def altered(**fields):
    """Fields of the output, each from the right one."""

    def change(right, head, hidden, batch):
        output = right(head, hidden, batch)
        return output._replace(**{name: alter(output) for name, alter in fields.items()})

    return component_of(change)


def every_label(right, head, hidden, batch):
    """Also learns from what is to be ignored."""
    output = right(head, hidden, {**batch, "labels": batch["labels"].clamp(min=0)})
    return output._replace(count=right(head, hidden, batch).count)


def constant_if_empty(right, head, hidden, batch):
    output = right(head, hidden, batch)
    return output if output.count else output._replace(sum=torch.zeros(()))


def nan_if_empty(right, head, hidden, batch):
    output = right(head, hidden, batch)
    return output._replace(sum=output.sum / output.count * output.count)


def of_the_batch(right, head, hidden, batch):
    """Also pulls the sequences of a micro-batch together."""
    output = right(head, hidden, batch)
    return output._replace(sum=output.sum + (hidden - hidden.mean(0)).square().sum())


def half_gradient(right, head, hidden, batch):
    output = right(head, hidden, batch)
    return output._replace(sum=(output.sum + output.sum.detach()) / 2)


def narrow(right, head, hidden, batch):
    output = right(head, hidden, batch)
    return output._replace(sum=output.sum.to(hidden.dtype))


def needs_gradients(right, head, hidden, batch):
    output = right(head, hidden, batch)
    torch.autograd.grad(output.sum, hidden, retain_graph=True)
    return output


def of_the_rank(right, head, hidden, batch):
    output = right(head, hidden, batch)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    return output._replace(sum=output.sum * (1 + rank))


SUM = "test_it_gives_sum_and_count_of_the_valid_positions"
SEQUENCES = "test_sums_of_sequences_add_up_to_what_is_reported"
EMPTY = "test_a_batch_without_valid_labels_gives_zero_and_zero_gradients"


@pytest.mark.parametrize(
    ("check", "component", "told"),
    [
        (SUM, altered(sum=lambda output: output.sum / output.count), "adds up to 217.062; its mean is 7.4849"),
        (SUM, altered(count=lambda output: output.count + 1), "`count` is 30, and 29 labels are not ignored"),
        (SUM, altered(sum=lambda output: output.sum[None]), "`sum` has the shape (1,); it is a scalar"),
        (SUM, component_of(lambda right, *inputs: tuple(right(*inputs))), "returns a LossOutput, and this one a tuple"),
        (
            SEQUENCES,
            altered(per_sequence=lambda o: (o.per_sequence[0].sum()[None], o.per_sequence[1])),
            "shape (1,), for 4",
        ),
        (SEQUENCES, altered(per_sequence=lambda o: (o.per_sequence[0] + 0 * o.sum, o.per_sequence[1])), "not detached"),
        (
            SEQUENCES,
            altered(per_sequence=lambda o: (2 * o.per_sequence[0], o.per_sequence[1])),
            "the sums of per_sequence: o",
        ),
        (
            SEQUENCES,
            altered(per_sequence=lambda o: (o.per_sequence[0], 1 + o.per_sequence[1])),
            "the counts of per_sequence",
        ),
        (
            "test_ignored_positions_do_not_matter",
            component_of(every_label),
            "of positions whose label is -100; leave these",
        ),
        (EMPTY, component_of(constant_if_empty), "`sum` cannot be differentiated; make it of the logits: RuntimeError"),
        (EMPTY, component_of(nan_if_empty), "with all labels ignored, sum and count are (nan, 0.0), and must be 0"),
        (
            "test_it_does_not_depend_on_micro_batches",
            component_of(of_the_batch),
            "sum over separate positions: off",
        ),
        (
            "test_gradients_are_those_of_the_objective_in_float64",
            component_of(half_gradient),
            "the hidden states: off by",
        ),
        (
            "test_results_are_wide",
            component_of(narrow),
            "in torch.bfloat16, `sum` is torch.bfloat16; it must be torch.float32",
        ),
        (
            "test_it_evaluates_without_gradients",
            component_of(needs_gradients),
            "it fails under torch.no_grad(): RuntimeError",
        ),
    ],
)
def test_what_is_wrong_is_told(refusal, check, component, told):
    assert told in refusal(LossSuite, check, component)


def test_variants_that_differ_are_told(refusal):
    wrong = altered(sum=lambda output: 1.1 * output.sum)
    said = refusal(LossSuite, "test_variants_give_the_same", CrossEntropy(), variants=(wrong,))
    assert not lacks(said, "sum of Wrong()")


def test_layouts_that_differ_are_told(refusal):
    check = "test_every_layout_trains_like_one_process"
    said = refusal(LossSuite, check, component_of(of_the_rank), "replicate2", layouts=("replicate2",))
    assert not lacks(said, "replicate2")


def asking(right, head, hidden, batch):
    return right(head, hidden if hidden.abs().max() < 1e9 else hidden / 2, batch)


class AskingSuite(LossSuite):
    component = component_of(asking)


def test_a_loss_for_which_the_host_waits_is_told_with_its_line(tmp_path):
    with pytest.raises(AssertionError) as error:
        AskingSuite().test_it_trains_on_a_device_and_waits_only_where_it_says(tmp_path)
    line = f"{__file__}:{asking.__code__.co_firstlineno + 1}"
    assert not lacks(str(error.value), "in a step of AskingSuite", line, "a value as a number")


def test_an_objective_of_ones_own_is_what_is_compared(tmp_path):
    class TestDoubled(LossSuite):
        component = altered(sum=lambda output: 2 * output.sum)

        def objective(self, logits, labels):
            return 2 * self.reported(logits, labels)

    TestDoubled().test_it_gives_sum_and_count_of_the_valid_positions(tmp_path)
    TestDoubled().test_gradients_are_those_of_the_objective_in_float64(tmp_path)
