"""Texts under the fields of classes."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from forge_kit.tools.documented_keys import field_docs

SOURCE = '''
from __future__ import annotations

from attrs import frozen


@frozen
class One:
    """One."""

    width: int = 1
    """Of one."""


if True:

    @frozen
    class Two(One):
        """Two."""

        height: int = 2
        """Of two."""


def make():
    @frozen
    class Three(Two):
        """Three."""

        depth: int = 3
        """Of three."""

    return Three
'''


def test_a_file_is_parsed_once_for_all_its_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "classes.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("classes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "classes", module)
    spec.loader.exec_module(module)
    parsed = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda *arguments: (parsed.append(arguments), parse(*arguments))[1])
    assert field_docs(module.One) == {"width": "Of one."}
    assert field_docs(module.Two) == {"width": "Of one.", "height": "Of two."}
    assert field_docs(module.make()) == {"width": "Of one.", "height": "Of two.", "depth": "Of three."}
    assert len(parsed) == 1
