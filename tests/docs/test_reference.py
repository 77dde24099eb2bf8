"""The reference has every kind, hook and event; and what the pages and templates tell authors to import is in it."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from fences import ALL, EXAMPLE, ROOT, TEN_MINUTES
from public_names import documented, imported, is_public

import forge_core
from forge_core.engine.hooks import EVENTS
from forge_plugin_author.new_plugin import kinds as kinds_with_template
from forge_testing import suites

sys.path.insert(0, str(ROOT / "docs"))

import generated
import generated_kinds

DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KINDS = sorted({*PROJECT["entry-points"]["forge.kind"], *generated_kinds.OF_KIT} - {"command"})
"""Those whose components stand in jobs; a command is a function."""


class Page:
    """What mkdocs hands to the hook, as far as it is used."""

    def __init__(self, path: str) -> None:
        self.file = self
        self.src_uri = path


@functools.cache
def made(path: str) -> str:
    """A page with its generated parts."""
    return generated.on_page_markdown((DOCS / path).read_text(), page=Page(path))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_in_the_reference_and_has_a_page_with_its_facts(kind: str, catalog) -> None:
    base = catalog.kind_base(kind).__name__
    [row] = [line for line in made("reference/components.md").splitlines() if line.startswith(f"| [`{kind}`]")]
    assert f"(../ten-minutes/{kind}.md)" in row
    assert f"[`{base}`]" in row
    page = made(f"ten-minutes/{kind}.md")
    assert f"[`{base}`](../" in page
    assert f"forge-run new-plugin {kind} " in page
    for place in (DOCS / "ten-minutes" / "index.md", ROOT / "mkdocs.yml"):
        assert f"{kind}.md" in place.read_text(), f"{place} does not lead to the page of {kind}"


def test_every_command_is_on_the_page_of_the_command_line(catalog) -> None:
    page = made("command-line.md")
    for offer in catalog.offers("command"):
        [row] = [line for line in page.splitlines() if line.startswith((f"| `{offer.type}` |", f"| [`{offer.type}`]("))]
        assert f"`{offer.distribution.name}`" in row
        assert len(row.split("|")[2].split()) > 2, f"{offer.type} has no summary"


def test_no_page_is_twice_in_the_navigation() -> None:
    pages = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert [page for page in pages if pages.count(page) > 1] == []


def test_every_kind_has_a_template(catalog) -> None:
    assert kinds_with_template() == KINDS
    pages = {page.stem for page in TEN_MINUTES.glob("*.md")}
    assert {*KINDS, "index"} <= pages <= {*catalog.types("kind"), "index"}  # those of plugins may have a page too


def test_every_suite_is_told_of_a_kind_and_listed() -> None:
    table = made("reference/components.md")
    testing = (DOCS / "testing.md").read_text()
    for name in suites.__all__:
        assert f"[`{name}`](../testing.md#" in table
        assert f"| `{name}` |" in testing
        assert f"members: [{name}]" in testing


def test_what_is_to_be_implemented_is_told_with_types_and_what_comes_back() -> None:
    rows = {row[0]: row[2] for row in generated_kinds.kind_rows(generated.Catalog.installed())}
    tokenizer = rows["[`tokenizer`](/ten-minutes/tokenizer.md)"]
    assert tokenizer.count("[`Tokenizer`](/reference/protocols.md#forge_core.contracts.data.Tokenizer)") == 2
    assert "folder: `Path`" in tokenizer


def test_every_hook_is_listed_with_its_arguments() -> None:
    rows = [line for line in made("reference/hooks.md").splitlines() if line.startswith("| [`forge_")]
    names = [name for name in vars(generated_kinds.ForgeHooks) if name.startswith("forge_")]
    assert [row.partition("`")[2].partition("`")[0] for row in rows] == names
    [optimizer] = [row for row in rows if "`forge_build_optimizer`" in row]
    assert "| `component`, `context`, `parameters` | of the first that does not give None |" in optimizer
    [validate] = [row for row in rows if "`forge_validate_job`" in row]
    assert "| of all together |" in validate


def test_a_hook_that_is_to_go_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    options = generated_kinds.ForgeHooks.forge_build_loss.forge_spec
    notice = forge_core.deprecated("the hook forge_build_loss", "9.0", "do without")
    monkeypatch.setitem(options, "warn_on_impl", notice)
    monkeypatch.setitem(options, "warn_on_impl_args", {"context": "the argument context is going"})
    [row] = [line for line in generated.hooks("").splitlines() if "[`forge_build_loss`]" in line]
    assert row.endswith(f"To go: {notice}. To go: the argument context is going. |")


def test_every_event_is_listed() -> None:
    page = made("training-hooks.md")
    rows = [line for line in page.splitlines() if line.startswith("| `on_")]
    assert [row.split("`")[1] for row in rows] == list(EVENTS)


# --- what is public ----------------------------------------------------------------------------------------------


def sources() -> Iterator[tuple[str, str]]:
    """What authors are shown: templates, the example, and the blocks of the pages."""
    for folder in (ROOT / "plugins" / "forge-plugin-author" / "forge_plugin_author" / "templates", EXAMPLE):
        yield from ((str(path.relative_to(ROOT)), path.read_text()) for path in sorted(folder.rglob("*.py")))
    yield from ((str(fence), fence.text) for fence in ALL if fence.language == "python")


def test_authors_are_shown_public_names_only() -> None:
    used = [(where, *names) for where, source in sources() for names in imported(source)]
    private = [f"{where}: {module}.{name}" for where, module, name in used if not is_public(module, name)]
    assert private == [], "put these into docs/reference/, or do without them"


def test_every_public_name_is_in_the_reference() -> None:
    modules, names = documented()
    missing = []
    homes = {name: module for module, names in forge_core._HOMES.items() for name in names}
    for name in forge_core.__all__:
        home = homes.get(name, "forge_core.contracts.components")
        if name != "__version__" and home not in modules and f"{home}.{name}" not in names:
            missing.append(f"{home}.{name}")
    assert missing == []


def test_the_workflow_that_releases_finds_the_version_of_a_distribution(installed_example: Path) -> None:
    [workflow] = [fence.text for fence in ALL if fence.title.endswith("release.yml")]
    [line] = [line for line in workflow.splitlines() if "--version" in line]
    command = line.partition("run: ")[2].replace("forge-plugin-restarts", EXAMPLE.name)
    command = command.replace("forge-run", f"{sys.executable} -m forge_core")
    environment = {"PYTHONPATH": str(installed_example), "PATH": "/usr/bin:/bin", "GITHUB_REF_NAME": "v0.1.0"}
    assert subprocess.run(["bash", "-c", command], env=environment).returncode == 0
    environment["GITHUB_REF_NAME"] = "v0.2.0"
    assert subprocess.run(["bash", "-c", command], env=environment).returncode == 1
