"""Runs a check of a suite on a component that is wrong on purpose, and returns what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[..., str]:
    """(suite, name of the check, component, other attributes of the suite) -> the message of its failure."""

    def run(suite: type, check: str, component: Any, *arguments: Any, **attributes: Any) -> str:
        test = type("TestWrong", (suite,), {"component": component, **attributes})()
        with pytest.raises(AssertionError) as caught:
            getattr(test, check)(*(arguments or (tmp_path,)))
        return str(caught.value)

    return run
