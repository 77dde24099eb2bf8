"""`tensorboard` keeps the contracts of its kind."""

from __future__ import annotations

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forge_plugin_tensorboard import TensorBoard
from forge_testing.distribution import check_distribution
from forge_testing.suites import LoggerSuite


def test_the_distribution():
    check_distribution("forge-plugin-tensorboard")


class TestTensorBoard(LoggerSuite):
    component = TensorBoard()

    def recorded_steps(self, folder):
        events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        return [event.step for event in events.Scalars("train/loss")]
