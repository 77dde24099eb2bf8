"""Check an installed distribution against the contracts of plugins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

Samples = Mapping[str, Mapping[str, Any]]
"""Type -> keys of its table."""


def check_distribution(name: str, samples: Samples | None = None) -> None:
    """Check the metadata of a distribution and everything that it offers.

    The distribution passes if:

    - it requires `forge-run`, with an upper bound, in a version that is running, and is installed as its sources say;
    - each entry point loads, and entry points of components load without importing torch;
    - a component is a documented attrs class of its kind, keyword-only, each key with a type and documentation;
    - it implements the methods of its kind, with the parameters that they are called with;
    - a component written to TOML is read back equal;
    - hooks of plugins fit their specifications, and events of training hooks exist.

    The check runs in a separate process, so that no earlier test can hide an import.

        def test_the_distribution():
            check_distribution("forge-plugin-lion")

    Args:
        name: Name of the distribution.
        samples: Keys of components that cannot be created from their defaults, by type: `{"text": {"path": "a.txt"}}`.

    Raises:
        AssertionError: There are problems; the message lists all of them, each with its fix.
    """
    problems = distribution_problems({name: samples or {}})[name]
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    assert not problems, "\n".join([f"{name} has {count}:", *(f"- {problem}" for problem in problems)])


def distribution_problems(samples: Mapping[str, Samples]) -> Mapping[str, Sequence[str]]:
    """Returns what `check_distribution` finds in each of several distributions, from one process for all of them.

    Args:
        samples: By the name of each distribution, the samples of `check_distribution`.

    Raises:
        AssertionError: The process ended: a module of one of them ends it.
    """
    command = [sys.executable, "-m", "forge_testing.inspection"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    given = json.dumps(samples)
    done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, check=False)
    try:
        found: Mapping[str, Sequence[str]] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        names = ", ".join(samples)
        raise AssertionError(f"looking at {names} ended the process:\n{done.stdout}{done.stderr}") from None
    return found
