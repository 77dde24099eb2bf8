"""What commands print with `--json`: one value, and nothing else on standard output."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from os import PathLike
from typing import Any


def add_json(parser: argparse.ArgumentParser, what: str = "") -> None:
    """Add the option `--json`; `what` continues its help."""
    parser.add_argument("--json", action="store_true", help=f"print JSON{what}")


def print_json(facts: Any) -> None:
    """Print facts as JSON; see `json_text`."""
    print(json_text(facts), flush=True)


def json_text(facts: Any, indent: int = 2) -> str:
    """Returns facts as JSON, in ASCII, so that a terminal of any encoding can print it.

    Args:
        facts: mappings, sequences, sets, paths, numbers of Python or NumPy, and texts. Numbers that are not finite,
            which JSON does not have, become strings (`"nan"`, `"inf"`), as in `metrics.jsonl`; other objects become
            what `str` returns.
        indent: spaces of each level.
    """
    return json.dumps(plain(facts), indent=indent, allow_nan=False)


def plain(value: Any) -> Any:
    """Returns a value as JSON can hold it: see `json_text`."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Set):
        # By their texts, as members of a set need not be comparable
        return sorted(map(plain, value), key=str)
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, bool | int | str):
        return value
    # Numbers and arrays of NumPy, without importing it
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def only_json(is_json: bool) -> AbstractContextManager[object]:
    """While it is open, what anything prints goes to standard error, if a command is to print JSON.

    For libraries that print on their own, such as evaluation harnesses.
    """
    return redirect_stdout(sys.stderr) if is_json else nullcontext()
