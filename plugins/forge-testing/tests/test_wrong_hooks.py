"""What the suite of hooks says of wrong ones; and that it takes plugins."""

from __future__ import annotations

import pytest
import torch
from attrs import define, field

from forge_core.contracts.components import Plugin, TrainingHook
from forge_core.contracts.hookspecs import hookimpl
from forge_testing.refusals import lacks
from forge_testing.suites import HookSuite

pytestmark = pytest.mark.thorough


@define(kw_only=True, slots=False)
class Misspelt(TrainingHook):
    def on_stepend(self, context):
        raise AssertionError("nobody calls this")


@define(kw_only=True, slots=False)
class NotPlain(TrainingHook):
    seen: set = field(init=False, factory=set)

    def on_step_end(self, context):
        self.seen.add(context.step)


@define(kw_only=True, slots=False)
class Loses(TrainingHook):
    count: int = field(init=False, default=0)

    def on_step_end(self, context):
        self.count += 1

    def load_state_dict(self, state):
        pass


@define(kw_only=True, slots=False)
class Beside(TrainingHook):
    """Remembers what no checkpoint holds."""

    def on_gradients(self, context):
        self.scale = getattr(self, "scale", 1.0) * 0.5
        for parameter in context.model.parameters():
            parameter.grad.mul_(self.scale)


@define(kw_only=True, slots=False)
class Nudges(TrainingHook):
    def on_step_end(self, context):
        with torch.no_grad():
            next(context.model.parameters()).add_(1e-3)


@define(kw_only=True, slots=False)
class NoiseOfTheRank(TrainingHook):
    """Gradient noise from the default generator, whose seed differs from rank to rank."""

    def on_gradients(self, context):
        for parameter in context.model.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)


@define(kw_only=True, slots=False)
class ScalesWithRanks(TrainingHook):
    """Divides by the number of ranks what is a sum already."""

    def on_gradients(self, context):
        for parameter in context.model.parameters():
            parameter.grad.mul_(0.1 if torch.distributed.get_world_size() > 1 else 1.0)


@define(kw_only=True, slots=False)
class Asks(TrainingHook):
    """Looks at a value in every step, for which the host waits for the device."""

    def on_step_end(self, context):
        self.norm = float(next(context.model.parameters()).norm())


class AskingSuite(HookSuite):
    component = Asks()


@define(kw_only=True, slots=False)
class Watches(TrainingHook):
    """Right: it does nothing to training."""


@define(kw_only=True, slots=False)
class Doubles(Plugin):
    """A plugin that changes training."""

    @hookimpl(wrapper=True)
    def forge_build_scheduler(self):
        schedule = yield
        return lambda step, total: 2 * schedule(step, total)


RANKS = "test_ranks_change_training_alike"
STATE, SAME = "test_its_state_is_plain_and_comes_back", "test_it_changes_training_only_if_it_says_so"


@pytest.mark.parametrize(
    ("check", "hook", "attributes", "told"),
    [
        (
            "test_its_events_exist",
            Misspelt(),
            {},
            "there is no event on_stepend; did you mean on_step_end? There are on_",
        ),
        (
            STATE,
            NotPlain(),
            {},
            "its state must be numbers, strings, lists, dicts or tensors: CheckpointError: could not",
        ),
        (STATE, Loses(), {}, "after load_state_dict, count of the state is not what state_dict returned"),
        (
            "test_a_run_that_continues_equals_one_that_was_not_interrupted",
            Beside(),
            {},
            "remembers from step to step must be a field(init=False), or in its `state_dict`",
        ),
        (SAME, Nudges(), {}, "a run without it differs in the losses, model.embedding.weight"),
        (SAME, Doubles(), {}, "If it is meant to change training, set `changes_training = True`"),
        (RANKS, NoiseOfTheRank(), {"changes_training": True}, "two ranks have other values of embedding.weight, "),
        (RANKS, ScalesWithRanks(), {"changes_training": True}, "than one process; what a hook does must not depend on"),
        (
            SAME,
            Watches(),
            {"changes_training": True},
            "changes_training is set, and a run without it is the same",
        ),
    ],
)
def test_what_is_wrong_is_told(refusal, check, hook, attributes, told):
    assert told in refusal(HookSuite, check, hook, **attributes)


def test_a_hook_for_which_the_host_waits_is_told_with_its_line(tmp_path):
    with pytest.raises(AssertionError) as error:
        AskingSuite().test_it_runs_on_a_device_and_waits_only_where_it_says(tmp_path)
    line = f"{__file__}:{Asks.on_step_end.__code__.co_firstlineno + 1}"
    assert not lacks(str(error.value), "in a run with AskingSuite", line, "5 times, for a value as a number")


class TestDoubles(HookSuite):
    component = Doubles()
    changes_training = True


class TestWatches(HookSuite):
    component = Watches()
