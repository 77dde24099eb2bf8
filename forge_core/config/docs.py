"""Documentation of components and their keys, read from source: docstrings, and the string literals under fields."""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib.util import find_spec
from pathlib import Path

import attrs


def class_doc(cls: type) -> str:
    """Docstring of a class, or of the nearest base that has one."""
    return inspect.getdoc(cls) or ""


def field_docs(cls: type) -> dict[str, str]:
    """Documentation of fields by name, inherited ones included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if attrs.has(base) and "__attrs_attrs__" in vars(base):
            docs |= _own_field_docs(base)
    return docs


def _own_field_docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # made without a source file
        return {}
    [definition] = tree.body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, follower in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = _literal(follower)
            if text:
                docs[statement.target.id] = inspect.cleandoc(text)
    return docs


def _literal(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return statement.value.value if isinstance(statement.value.value, str) else ""
    return ""


def function_summary(module: str, function: str) -> str:
    """First line of a function's docstring, without importing its module or a package above; empty if there is none."""
    package, *names = module.split(".")
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        source = Path(folder).joinpath(*names)
        for path in (source.with_suffix(".py"), source / "__init__.py"):
            if path.is_file():
                return _summary_in(path, function)
    return ""


def _summary_in(path: Path, function: str) -> str:
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == function:
            return summary(ast.get_docstring(statement) or "")
    return ""


def summary(doc: str) -> str:
    """First line of a docstring."""
    return doc.partition("\n")[0]


def one_paragraph(doc: str) -> str:
    """A docstring's first paragraph on one line."""
    return " ".join(doc.partition("\n\n")[0].split())
