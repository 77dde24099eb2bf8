"""The list of deliberate mistakes fits the present sources and tests. `run.py` tries them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from run import ROOT, AnchorError, Mistake, locate, read_table

MISTAKES = read_table()


def test_there_are_at_least_thirty_of_different_names():
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 30


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_can_be_made_and_has_tests(mistake):
    text = locate(mistake, ROOT).read_text()
    compile(text.replace(mistake.old, mistake.new), mistake.name, "exec")
    for test in mistake.tests:
        path, _, name = test.partition("::")
        name = name.partition("[")[0].partition("::")[0]
        assert (ROOT / path).is_file(), test
        forms = (f"def {name}(", f"class {name}(", f"\n{name} = ")  # a law returns a test
        assert not name or any(form in (ROOT / path).read_text() for form in forms), test


@pytest.mark.parametrize("text", ["text that stands nowhere", "def build("])
def test_a_text_that_does_not_stand_exactly_once_is_refused(text):
    with pytest.raises(AnchorError, match=r"'wrong': .*\b\d+ times"):
        locate(Mistake("wrong", text, "", []), ROOT)
