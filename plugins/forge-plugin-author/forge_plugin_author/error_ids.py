"""Ids of errors: of problems in a job, and of the causes for which runs end."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib.resources import files

from attrs import frozen

TABLE = "errors.toml"


@frozen
class ErrorKind:
    """Documentation of all errors with one id.

    `id` is the field of a `Problem`, or a `Cause` in `end.json`. `meaning` and `fix` are sentences, `page` is
    a page of the documentation, relative to its root.
    """

    id: str
    meaning: str
    fix: str
    page: str


@functools.cache
def error_kinds() -> Mapping[str, ErrorKind]:
    """Returns every kind of error by its id: first of problems, then the causes of an end."""
    # A table of data and not docstrings, so that the page of the documentation and the command print the same
    table = tomllib.loads(files("forge_plugin_author").joinpath(TABLE).read_text(encoding="utf-8"))
    return {id_: ErrorKind(id_, **texts) for id_, texts in table.items()}
