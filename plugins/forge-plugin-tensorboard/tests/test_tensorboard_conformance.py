"""`tensorboard` keeps the contracts of its kind."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from forge_plugin_tensorboard import TensorBoard
from forge_testing.suites import LoggerSuite


class TestTensorBoard(LoggerSuite):
    component = TensorBoard()

    @pytest.fixture(autouse=True)
    def first_files_of_the_process(self, monkeypatch):
        # Files of one second are read in the order of these numbers as text, in which the tenth is before the ninth
        monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))

    def recorded_steps(self, folder):
        events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        return [event.step for event in events.Scalars("train/loss")]
