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
from search_ranks import rank

DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KINDS = sorted({*PROJECT["entry-points"]["forge.kind"]} - {"command"})
"""Those whose components stand in jobs; a command is a function."""


class Page:
    """What mkdocs hands to the hook, as far as it is used."""

    def __init__(self, path: str) -> None:
        self.file = self
        self.src_uri = path


@functools.cache
def made(path: str) -> str:
    """A page with its generated parts."""
    text = generated.key_pages().get(path) or (DOCS / path).read_text()
    return generated.on_page_markdown(text, page=Page(path))


def sections_of(text: str) -> dict[str, str]:
    """The text below each heading that has an anchor, by anchor."""
    _, *parts = re.split(r"^#+ .* \{ #(\S+) \}$", text, flags=re.MULTILINE)
    assert len(set(parts[::2])) == len(parts[::2])
    return dict(zip(parts[::2], parts[1::2], strict=True))


def first_cells(text: str) -> list[str]:
    """The first cell of each row of the tables of a text, without those of the heads."""
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    return [cell for cell in rows if cell not in ("key", "---")]


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


@pytest.mark.parametrize("path", sorted(generated.key_pages()))
def test_the_page_of_a_kind_has_every_component_with_its_prose_its_package_and_its_keys(path: str, catalog) -> None:
    kind = Path(path).stem
    sections = sections_of(made(path))
    assert list(sections) == [f"kind-{kind}", *(f"{kind}.{offer.type}" for offer in catalog.offers(kind))]
    for offer in catalog.offers(kind):
        cls, name, text = catalog.load(kind, offer.qualified), offer.distribution.name, sections[f"{kind}.{offer.type}"]
        readme = f"](../../plugins/{name}.md)" if name != "forge-run" else ""
        assert text.strip().startswith(f"{generated.class_doc(cls)}\n\nFrom {'[' if readme else ''}`{name}`{readme}.")
        assert first_cells(text) == [f"`{key.name}`" for key in generated.keys_of(cls)]


def test_the_page_of_sections_has_every_section_of_the_core_with_its_keys() -> None:
    sections = sections_of(made("reference/keys/sections.md"))
    own = {key.name: generated.section_in(key.type) for key in generated.keys_of(generated.Job)}
    expected = {name: section for name, section in own.items() if section is not None}
    assert {*expected, "data.phases"} == set(sections)
    for name, section in expected.items():
        assert first_cells(sections[name]) == [f"`{key.name}`" for key in generated.keys_of(section)]


def test_the_overview_of_keys_leads_to_every_section_and_component_and_has_their_anchors(catalog) -> None:
    text = made("reference/keys.md")
    for key in generated.keys_of(generated.Job):
        assert re.search(rf"^\| \[?`\[+{key.name}(\.\w+)?\]+`", text, re.MULTILINE), key.name
    for anchor in sections_of(made("reference/keys/sections.md")):
        assert f"](../reference/keys/sections.md#{anchor}){{ #{anchor} }}" in text
    for kind in {offer.kind for offer in catalog.offers()} - {"kind", "command"}:
        assert f"| [`{kind}`](../reference/keys/{kind}.md){{ #kind-{kind} }} |" in text
        for offer in catalog.offers(kind):
            anchor = f"{kind}.{offer.type}"
            assert f"[`{offer.type}`](../reference/keys/{kind}.md#{anchor}){{ #{anchor} }}" in text


def test_every_page_of_keys_is_in_the_navigation() -> None:
    outer, inner = generated.NAVIGATION
    config = {"nav": [{"Home": "index.md"}, {outer: [{"The job file": "job-file.md"}, {inner: []}]}]}
    [found] = [entry[inner] for entry in generated.on_config(config)["nav"][1][outer] if inner in entry]
    assert [page for entry in found for page in entry.values()] == list(generated.key_pages())
    nav = (ROOT / "mkdocs.yml").read_text()
    assert f"\n  - {outer}:\n" in nav
    assert f"\n      - {inner}:\n" in nav


@pytest.mark.parametrize(
    ("path", "section", "found"),
    [
        ("getting-started.md", "Tutorials", {"boost": 2}),
        ("moe.md", "How-to guides", {"boost": 2}),
        ("testing.md", "How-to guides", {}),
        ("concepts.md", "Explanation", {}),
        ("reference/keys.md", "Reference", {"boost": 0.5}),
        ("reference/keys/model.md", "Reference", {"boost": 0.5}),
        ("reference/protocols.md", "Reference", {"boost": 0.5}),
        ("reference/json.md", "Reference", {}),
        ("log.md", "Project", {"exclude": True}),
        ("benchmarks.md", "Project", {}),
    ],
)
def test_guides_are_found_before_what_is_generated(path: str, section: str, found: dict) -> None:
    assert (DOCS / path).exists() or path in generated.key_pages()
    assert f"\n  - {section}:\n" in (ROOT / "mkdocs.yml").read_text()
    assert rank(path, [section]) == found


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
