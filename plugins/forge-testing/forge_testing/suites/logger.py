"""Contract of every logger, as tests."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from forge_core.contracts.components import LoggerComponent
from forge_core.contracts.errors import ExitCode
from forge_core.contracts.runtime import LearnsEnd, Logger, TakesArtifacts
from forge_testing.outcomes import Stop, losses_of
from forge_testing.suites.base import Suite, explained


def training_line(step: int) -> dict[str, Any]:
    """Return a record as the engine writes it for a step."""
    numbers = {"loss": 3.0 / step, "lr": 1e-3, "tokens": 32 * step, "tokens_per_second": 3200.0}
    return {"step": step, **numbers, "step_seconds": 0.01, "data_wait": 0.1, "grad_norm": 0.5}


class LoggerSuite(Suite):
    """Records of every form, a clean end, a continued run, and unchanged training.

        class TestTable(LoggerSuite):
            component = Table()

            def recorded_steps(self, folder):
                lines = (folder / "table.csv").read_text().splitlines()[1:]
                return [int(line.partition(",")[0]) for line in lines]

    Without `recorded_steps`, the suite cannot check that a continued run drops stale lines.
    """

    component: ClassVar[LoggerComponent]

    def recorded_steps(self, folder: Path) -> Sequence[int] | None:
        """Return the steps of the training lines in a run's folder, in order; None: they cannot be read back."""
        return None

    def test_it_takes_every_record(self, tmp_path: Path) -> None:
        """Training lines, evaluations, numbers that are not finite, counts, and keys that only some lines have."""
        logger = self._started(tmp_path)
        records = [
            training_line(1),
            {"step": 1, "eval/loss": 2.5, "eval/perplexity": 12.2},
            {**training_line(2), "aux/balance": 0.1, "skipped": True},
            {**training_line(3), "loss": math.nan, "grad_norm": math.inf},
            {**training_line(4), "counts": {"tokens": {"0": [3.0, 5.0], "2": [8.0, 0.0]}}},
            {"step": 5, "eval/loss": -math.inf},
        ]
        for record in records:
            given = copy.deepcopy(record)
            with explained(f"log fails with {record}, and a run would end"):
                logger.log(given)
            same = given.keys() == record.keys() and repr(given) == repr(record)
            assert same, f"log changed the record {record} into {given}; other loggers get the same one: copy it"
        with explained("close fails"):
            logger.close()

    def test_it_can_end_without_a_line(self, tmp_path: Path) -> None:
        """As when a run fails in its first step, and when no step was left to do."""
        for step in (0, 5):
            logger = self._started(tmp_path / str(step), step)
            with explained(f"close fails after start({step}) and no record"):
                logger.close()

    def test_it_flushes_at_any_time(self, tmp_path: Path) -> None:
        """`flush`, where there is one, is called before each checkpoint: with and without new records."""
        logger = self._started(tmp_path)
        flush = getattr(logger, "flush", None)
        if flush is None:
            logger.close()
            pytest.skip("it keeps no records in memory")
        with explained("flush fails before the first record"):
            flush()
        logger.log(training_line(1))
        for _ in range(2):
            with explained("flush fails"):
                flush()
        logger.close()

    def test_it_takes_files_and_learns_the_end(self, tmp_path: Path) -> None:
        """Files of any kind, that are there for a moment only, and each way in which a run ends."""
        endings = {ExitCode.FINISHED: "", ExitCode.STOPPED: "signal SIGTERM", ExitCode.FAILED: "ValueError: no\nluck"}
        for code, reason in endings.items():
            logger = self._started(tmp_path / str(int(code)))
            if not isinstance(logger, TakesArtifacts) and not isinstance(logger, LearnsEnd):
                logger.close()
                pytest.skip("it takes no files, and learns nothing of the end")
            logger.log(training_line(1))
            if isinstance(logger, TakesArtifacts):
                for name, content in {"notes.txt": "grüße\n".encode(), "picture.png": b"\x89PNG\r\n"}.items():
                    path = tmp_path / name
                    path.write_bytes(content)
                    with explained(f"artifact fails with {name}"):
                        logger.artifact(path, name, 1)
                    path.unlink()
            with explained(f"end({code}, {reason!r}) and close fail"):
                if isinstance(logger, LearnsEnd):
                    logger.end(code, reason)
                logger.close()

    def test_a_continued_run_drops_what_is_stale(self, tmp_path: Path) -> None:
        """A run that was killed after its checkpoint logs the later steps again; start(0) discards all lines."""
        for start, kept in ((2, [1, 2]), (0, [])):
            folder = tmp_path / str(start)
            logger = self._started(folder)
            for step in (1, 2, 3, 4):
                logger.log(training_line(step))
            logger.close()
            if self.recorded_steps(folder) is None:
                pytest.skip("the suite does not say how to read its steps back: override `recorded_steps`")
            logger = self._started(folder, start)
            logger.log(training_line(start + 1))
            logger.close()
            actual, expected = list(self.recorded_steps(folder) or ()), [*kept, start + 1]
            assert actual == expected, (
                f"4 steps were logged, then start({start}) and step {start + 1}: it has {actual} and must have "
                f"{expected}; in `start(step)`, drop all steps after `step`, and everything if it is 0"
            )

    def test_training_does_not_notice(self, tmp_path: Path) -> None:
        """A run that stops and continues has the same losses with and without it."""
        losses = []
        for name, loggers in (("without", {}), ("with", {"tested": self.make(tmp_path)})):
            changes: Mapping[str, Any] = {"steps": 4, "eval": {"interval": 2}, "job": self._names(tmp_path, name)}
            self.train(self.tiny_job(tmp_path, **changes, loggers=loggers), Stop(step=2))
            with explained(f"a run that continues fails {name} the logger"):
                summary = self.train(self.tiny_job(tmp_path, **changes, loggers=loggers))
            losses.append(losses_of(summary))
        assert losses[0] == losses[1], f"without the logger, losses are {losses[0]}, with it {losses[1]}"
        steps = self.recorded_steps(tmp_path / "with")
        assert steps is None or list(steps) == [1, 2, 3, 4], f"of a run of 4 steps, it has the steps {steps}"

    def _names(self, folder: Path, name: str) -> Mapping[str, str]:
        return {"name": name, "output": str(folder)}

    def _started(self, folder: Path, step: int = 0) -> Logger:
        folder.mkdir(exist_ok=True)
        component = self.make(folder)
        context = self.context(self.tiny_job(folder, loggers={"tested": component}), folder)
        logger = context.build(component)
        with explained(f"start({step}) fails"):
            logger.start(step)
        return logger
