"""`tensorboard` keeps the contracts of its kind."""

from __future__ import annotations

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forge_core.testing.distribution import check_distribution
from forge_core.testing.suites import LoggerSuite
from forge_plugin_tensorboard import TensorBoard


def test_the_distribution():
    check_distribution("forge-plugin-tensorboard")


class TestTensorBoard(LoggerSuite):
    component = TensorBoard()

    def recorded_steps(self, folder):
        events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        return [event.step for event in events.Scalars("train/loss")]
