"""Warnings on the terminal."""

from __future__ import annotations

import json

SCRIPT = """
import json, sys, warnings
from forge_core import cli
sys.argv = ["forge-run", "--version"]
cli.main()
warnings.warn_explicit("passing over it", UserWarning, cli.__file__, 7)
warnings.warn_explicit("old", UserWarning, json.__file__, 1)
"""


def test_no_line_of_code_is_shown_and_of_ours_not_even_its_place(python):
    shown = python("-c", SCRIPT).stderr.splitlines()
    assert shown == ["warning: passing over it", f"{json.__file__}:1: UserWarning: old"]
