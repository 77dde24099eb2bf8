"""Contract of every training hook, and of every plugin that acts through hooks, as tests."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from attrs import define
from torch import Tensor

from forge_core.contracts.components import Plugin, TrainingHook
from forge_core.contracts.contexts import StepContext, TrainContext
from forge_core.engine.hooks import EVENTS
from forge_core.engine.trainer import Summary
from forge_core.job import Job
from forge_testing.outcomes import Stop, losses_of, saved_state, some, state_differences
from forge_testing.pretend import NAME, on_device
from forge_testing.pretend.clocks import clocks
from forge_testing.processes import run_on_ranks
from forge_testing.suites.base import Suite, explained, undeclared_waits

STEPS = 6


class HookSuite(Suite):
    """State that is part of checkpoints, and training that does not change unless the suite declares this.

        class TestSamples(HookSuite):
            component = Samples(every_eval=True)

    Takes training hooks and components of kind `plugin`.
    """

    component: ClassVar[TrainingHook | Plugin]
    changes_training: ClassVar[bool] = False
    """Whether losses and weights may differ from a run without the component."""
    waits: ClassVar[Mapping[str, int]] = {}
    """How often the host waits for the device because of the component, in five steps without an evaluation and a
    checkpoint, by the file of the code that does."""
    needs_cpu: ClassVar[str] = ""
    """Why it cannot run on the pretended device; empty: it can."""

    def make(self, folder: Path) -> Any:
        """Return a new object with the settings of `component`, as it holds the state of a run."""
        return attrs.evolve(super().make(folder))

    def test_its_events_exist(self, tmp_path: Path) -> None:
        """A method `on_…` that belongs to no event would never run."""
        hook = self.make(tmp_path)
        names = [name for name in dir(type(hook)) if name.startswith("on_")] if isinstance(hook, TrainingHook) else []
        for name in names:
            close = difflib.get_close_matches(name, EVENTS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            assert name in EVENTS, f"there is no event {name}{hint} There are {', '.join(EVENTS)}"

    def test_its_state_is_plain_and_comes_back(self, tmp_path: Path) -> None:
        """`state_dict` returns tensors and plain types, and `load_state_dict` restores the same state from them."""
        hook = self.make(tmp_path)
        with explained("a run with it fails; its state must be numbers, strings, lists, dicts or tensors"):
            self.train(self._job(tmp_path, hook, "run"))
        before = hook.state_dict()
        fresh = self.make(tmp_path)
        with explained("load_state_dict does not accept what state_dict returned"):
            fresh.load_state_dict(before)
        lost = _unequal(fresh.state_dict(), before)
        assert not lost, f"after load_state_dict, {some(lost)} of the state is not what state_dict returned"

    def test_a_run_that_continues_equals_one_that_was_not_interrupted(self, tmp_path: Path) -> None:
        """Losses, weights, and its own state are bitwise equal."""
        whole = self.train(self._job(tmp_path, self.make(tmp_path), "whole"))
        self.train(self._job(tmp_path, self.make(tmp_path), "parts"), Stop(step=3))
        parts = self.train(self._job(tmp_path, self.make(tmp_path), "parts"))
        differ = state_differences(parts, whole)
        assert not differ, (
            f"a run that stopped after step 3 and continued ends with other values of {some(differ)}; what the hook "
            "remembers from step to step must be a field(init=False), or in its `state_dict`"
        )
        assert losses_of(parts) == losses_of(whole), "a run that stopped and continued has other losses"

    def test_it_changes_training_only_if_it_says_so(self, tmp_path: Path) -> None:
        """A run without it has bitwise the same losses and final weights."""
        actual = self.train(self._job(tmp_path, self.make(tmp_path), "with"))
        expected = self.train(self._job(tmp_path, None, "without"))
        differ = _weights_that_differ(actual, expected)
        if losses_of(actual) != losses_of(expected):
            differ = ["the losses", *differ]
        if self.changes_training:
            assert differ, (
                "changes_training is set, and a run without it is the same: leave it out, or choose settings "
                "with which it acts within some steps"
            )
            return
        assert not differ, (
            f"a run without it differs in {some(differ)}; a hook that observes must neither write into weights, "
            "gradients or optimizer, nor draw from torch's generators. If it is meant to change training, set "
            "`changes_training = True` in its suite"
        )

    def test_ranks_change_training_alike(self, tmp_path: Path) -> None:
        """Two ranks that each hold the whole model end with the same weights as each other and as one process."""
        if not self.changes_training:
            pytest.skip("it leaves training as it is")

        def weights(name: str) -> Mapping[str, Tensor]:
            last = Weights()
            self.train(self._job(tmp_path, self.make(tmp_path), name, precision="fp64"), last)
            return last.weights

        with explained("it fails on two ranks"):
            first, second = run_on_ranks(2, lambda rank: weights("two"))
        differ = _unequal(second, first)
        assert not differ, (
            f"after {STEPS} steps two ranks have other values of {some(differ)}; what a hook draws or decides must be "
            "the same on every rank: derive it from the seed of the job and the step, or agree on it"
        )
        alone = weights("one")
        differ = [name for name in alone if not torch.allclose(first[name], alone[name], rtol=1e-6, atol=1e-8)]
        assert not differ, (
            f"two ranks end with other values of {some(differ)} than one process; what a hook does must not depend on "
            "the number of ranks"
        )

    def test_it_runs_on_a_device_and_waits_only_where_it_says(self, tmp_path: Path) -> None:
        """On the device of `forge_testing.pretend`, losses are the CPU's, and waits are counted by file and line."""
        if self.needs_cpu:
            pytest.skip(self.needs_cpu)
        found, waits = on_device(type(self).trained_on_device, str(tmp_path))
        expected = losses_of(self.train(self._job(tmp_path, self.make(tmp_path), "cpu")))
        assert found == pytest.approx(expected, rel=1e-5), "a run with it has other losses on a device than on the CPU"
        wrong = undeclared_waits(f"a run with {type(self).__name__}", waits, self.waits)
        assert not wrong, wrong
        stated = self.make(tmp_path).waits()
        assert bool(stated) == bool(self.waits), (
            f"its method `waits`, which the run's summary shows, returns {stated!r}, and the suite has "
            f"{dict(self.waits)}; return how often the host waits for the device and why, or nothing where it does not"
        )

    @classmethod
    def trained_on_device(cls, folder: str) -> tuple[list[float], Mapping[tuple[str, str], int]]:
        """In a process with the pretended device: losses with the component, and the waits that it adds."""
        suite, path, counts = cls(), Path(folder), list[Counter[tuple[str, str]]]()
        for hook, name in ((None, "device-without"), (suite.make(path), "device-with")):
            waits = Waits()
            summary = suite.train(suite._job(path, hook, name, device=NAME, eval={}, checkpoint={}), waits)
            counts.append(waits.counted)
        return losses_of(summary), dict(counts[1] - counts[0])

    def _job(self, folder: Path, hook: TrainingHook | Plugin | None, name: str, **changes: Any) -> Job:
        table = "plugins" if isinstance(hook, Plugin) else "hooks"
        changes |= {} if hook is None else {table: {"tested": hook}}
        where = {"name": name, "output": str(folder)}
        often = {"eval": {"interval": 2}, "checkpoint": {"interval": 2}}
        return self.tiny_job(folder, steps=STEPS, job=where, **(often | changes))


@define(kw_only=True, slots=False)
class Weights(TrainingHook):
    """Keeps a copy of the weights after the last step."""

    def on_train_end(self, context: TrainContext) -> None:
        assert isinstance(context.model, torch.nn.Module)
        self.weights = {name: value.detach().clone() for name, value in context.model.state_dict().items()}


@define(kw_only=True, slots=False)
class Waits(TrainingHook):
    """Counts the host's waits for the pretended device from the end of the first step to that of the last."""

    def on_step_end(self, context: StepContext) -> None:
        if context.step == 1:
            self._before = Counter(clocks.waits)
        elif context.step == STEPS:
            self.counted = Counter(clocks.waits) - self._before


def _weights_that_differ(actual: Summary, expected: Summary) -> list[str]:
    ours, theirs = saved_state(actual)[0], saved_state(expected)[0]
    return [name for name in theirs if name not in ours or not torch.equal(ours[name], theirs[name])]


def _unequal(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    return [name for name in expected if name not in actual or not _same(actual[name], expected[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other
