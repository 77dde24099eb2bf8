"""The notebooks of `docs/notebooks/` run from top to bottom, by public names alone, and are on a page."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
from public_names import imported, is_public

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.py"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    runpy.run_path(str(notebook))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_asserts_what_it_shows(notebook: Path) -> None:
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(notebook.read_text())))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_uses_public_names(notebook: Path) -> None:
    source = notebook.read_text()
    assert all(is_public(*name) for name in imported(source))
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    others = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
    assert {name for name in others if not name.startswith("forge_")} <= {"torch", "matplotlib", "safetensors"}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_shows_its_cells(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comment = f"<!-- generated: notebook {notebook.stem} -->"
    [page] = [path for path in (ROOT / "docs").rglob("*.md") if comment in path.read_text()]
    monkeypatch.syspath_prepend(ROOT / "docs")
    from generated import notebook as cells

    text = cells(notebook.stem)
    assert "# %%" not in text
    assert text.count("```python") >= 3
    for link in re.findall(r"\]\((\.\.?/[^)#]+)", text):
        assert (page.parent / link).is_file(), link
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    statements = [ast.dump(node) for node in ast.parse(notebook.read_text()).body]
    assert [ast.dump(node) for node in ast.parse(code).body] == statements
