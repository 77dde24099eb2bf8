"""Warnings on the terminal."""

from __future__ import annotations

SCRIPT = """
import sys, warnings
from forge_core import cli
sys.argv = ["forge-run", "--version"]
cli.main()
warnings.warn_explicit("passing over it", UserWarning, cli.__file__, 7)
warnings.warn_explicit("old", UserWarning, "/elsewhere/lib.py", 7)
"""


def test_ours_are_shown_without_the_place_in_the_code(python):
    shown = python("-c", SCRIPT).stderr.splitlines()
    assert shown == ["warning: passing over it", "/elsewhere/lib.py:7: UserWarning: old"]
