"""SkyPilot's own schema of a task, by which keys and documents are checked without SkyPilot.

`task.schema.json` is what SkyPilot 0.14.1 (Apache License 2.0) has itself, as `tests/vendor_schema.py` prints it. It
is a copy, as SkyPilot is installed in a separate environment: its pins of click exclude huggingface_hub and wandb.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

FILE = "task.schema.json"
VERSION = "0.14.1"


def problem_of(document: Mapping[str, Any], part: str = "") -> str:
    """Returns why a document is no task of SkyPilot; empty if it is one.

    Args:
        document: plain dicts and lists.
        part: place of the document in a task (`resources`); by default it is a whole one.
    """
    from jsonschema.exceptions import best_match

    # Of several errors the one that is furthest in, which is about the key that was meant
    error = best_match(_validator(part).iter_errors(document))
    if error is None:
        return ""
    where = ".".join(str(key) for key in error.absolute_path)
    return f"{where}: {error.message}" if where else error.message


@functools.cache
def _validator(part: str) -> Any:
    from jsonschema import Draft202012Validator

    schema = json.loads(files("forge_plugin_skypilot").joinpath(FILE).read_text())
    return Draft202012Validator(schema["properties"][part] if part else schema)
