"""What the suite of loggers says of wrong ones."""

from __future__ import annotations

import json

import pytest
from attrs import frozen

from forge_core.contracts.components import LoggerComponent
from forge_core.metrics.jsonl import JsonLinesLogger
from forge_testing.suites import LoggerSuite

pytestmark = pytest.mark.thorough


class Lines(JsonLinesLogger):
    """The core's, which is right; subclasses alter it."""


class Strict(Lines):
    def log(self, record):
        json.dumps(record, allow_nan=False)


class Changing(Lines):
    def log(self, record):
        record.pop("step")


class NeedsALine(Lines):
    def log(self, record):
        super().log(record)
        self.last = record

    def close(self):
        self.last["step"]


class NeedsANewLine(NeedsALine):
    def flush(self):
        del self.last

    def close(self):
        pass


class KeepsAll(Lines):
    def start(self, step):
        self._file = self._path.open("ab", buffering=0)
        self._unwritten = b""


class Exclusive(Lines):
    def start(self, step):
        self._path.touch(exist_ok=False)
        super().start(step)


def component_of(logger):
    @frozen(kw_only=True)
    class Wrong(LoggerComponent):
        def build(self, context):
            return logger(context.folder / "lines.jsonl")

    return Wrong()


def recorded_steps(suite, folder):
    return [json.loads(line)["step"] for line in (folder / "lines.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("check", "logger", "told"),
    [
        ("test_it_takes_every_record", Strict, "'loss': nan, 'lr'"),
        ("test_it_takes_every_record", Changing, "other loggers get the same one: copy it"),
        ("test_it_can_end_without_a_line", NeedsALine, "close fails after start(0) and no record: AttributeError"),
        ("test_it_flushes_at_any_time", NeedsANewLine, "flush fails before the first record: AttributeError"),
        ("test_a_continued_run_drops_what_is_stale", KeepsAll, "it has [1, 2, 3, 4, 3] and must have [1, 2, 3]; in"),
        ("test_training_does_not_notice", Exclusive, "a run that continues fails with the logger: FileExistsError"),
    ],
)
def test_what_is_wrong_is_told(refusal, check, logger, told):
    assert told in refusal(LoggerSuite, check, component_of(logger), recorded_steps=recorded_steps)


def test_stale_records_are_not_looked_for_where_none_can_be_read(tmp_path):
    class TestRight(LoggerSuite):
        component = component_of(Lines)

    with pytest.raises(pytest.skip.Exception, match="override `recorded_steps`"):
        TestRight().test_a_continued_run_drops_what_is_stale(tmp_path)
