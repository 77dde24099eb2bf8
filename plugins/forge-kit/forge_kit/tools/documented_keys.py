"""The keys of tables as documentation presents them: types, defaults, demands, and the texts under their fields."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import attrs
from attrs import frozen

from forge_core.config.field_types import toml_text
from forge_core.config.keys import Demand, default_of, demands, resolved_fields
from forge_core.contracts.components import DefaultType
from forge_core.contracts.deprecation import KEY


@frozen
class Key:
    """One key of a table: a field of its class."""

    name: str
    type: Any
    default: Any
    """The value, a `DefaultType`, or `attrs.NOTHING` for a required key."""
    demands: tuple[Demand, ...]
    doc: str

    @property
    def required(self) -> bool:
        """Whether a job must set it, as it has no default."""
        return self.default is attrs.NOTHING

    @property
    def default_text(self) -> str:
        """The default as TOML; empty if a job cannot write it."""
        if isinstance(self.default, DefaultType):
            return f'type = "{self.default.type}"'
        return "" if self.required or self.default is None or attrs.has(type(self.default)) else toml_text(self.default)


def keys_of(cls: type) -> list[Key]:
    """Returns the keys of an attrs class, in order. Raises `PluginError` if its field types cannot be resolved."""
    docs, keys = field_docs(cls), []
    for key, f in resolved_fields(cls).items():
        depends = f.default is not attrs.NOTHING and default_of(f) is attrs.NOTHING
        doc, notice = docs.get(f.name, ""), str(f.metadata.get(KEY, ""))
        if notice:
            doc = f"{doc} {notice[0].upper()}{notice[1:]}.".lstrip()
        keys.append(Key(key, f.type, None if depends else default_of(f), tuple(demands(f.validator)), doc))
    return keys


# --- documentation from source -----------------------------------------------------------------------------------


def class_doc(cls: type) -> str:
    """Docstring of a class, or of the nearest base that has one."""
    return inspect.getdoc(cls) or ""


def one_paragraph(doc: str) -> str:
    """A docstring's first paragraph on one line."""
    return " ".join(doc.partition("\n\n")[0].split())


def field_docs(cls: type) -> dict[str, str]:
    """The string literals under the fields of a class, by field, inherited ones included."""
    docs: dict[str, str] = {}
    # Bases first: a subclass may document an inherited field again
    for base in reversed(cls.__mro__):
        for statement, follower in pairwise(_body(base) if "__attrs_attrs__" in vars(base) else ()):
            match statement, follower:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))) if text:
                    docs[name] = inspect.cleandoc(text)
    return docs


def _body(cls: type) -> list[ast.stmt]:
    try:
        path = inspect.getsourcefile(cls) or ""
        # With the time of the last change, so that a file that is edited while the process runs is parsed again
        definition = _definitions(path, os.stat(path).st_mtime_ns).get(cls.__qualname__)
        if definition is None:
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError):  # made without a source file
        return []
    assert isinstance(definition, ast.ClassDef)
    return definition.body


@functools.cache
def _definitions(path: str, _changed_ns: int) -> Mapping[str, ast.stmt]:
    """The classes of a file, by qualified name. Parsed once: `inspect.getsource` parses it for each of its classes."""
    with tokenize.open(path) as file:
        tree = ast.parse(file.read())
    return dict(_named_classes(tree, ""))


def _named_classes(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef(name=name):
                yield prefix + name, child
                yield from _named_classes(child, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from _named_classes(child, f"{prefix}{name}.<locals>.")
            case ast.stmt():
                yield from _named_classes(child, prefix)
