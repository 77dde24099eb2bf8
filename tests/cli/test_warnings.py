"""Warnings on the terminal."""

from __future__ import annotations

import warnings

from forge_core import cli
from forge_core.checkpoint import resume


def test_ours_are_told_without_the_place_in_the_code(capsys):
    with warnings.catch_warnings():
        warnings.showwarning = cli._show_warning
        warnings.warn_explicit("passing over it", UserWarning, resume.__file__, 7)
        warnings.warn_explicit("old", UserWarning, "/elsewhere/lib.py", 7)
    told = capsys.readouterr().err.splitlines()
    assert told == ["warning: passing over it", "/elsewhere/lib.py:7: UserWarning: old"]
