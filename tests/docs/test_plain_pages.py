"""The documentation for programs: lists of pages, and each page as Markdown with everything in it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from fences import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import plain_pages
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import PluginError

PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "examples" not in path.parts)
LEFT = re.compile(r"^::: |^ *--8<-- ", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of a few pages, built with the hook."""
    folder = tmp_path_factory.mktemp("site")
    docs = folder / "docs"
    (docs / "how-to").mkdir(parents=True)
    (docs / "index.md").write_text("# Small\n\nWhat [it](how-to/a.md) is.\n")
    (docs / "how-to/a.md").write_text(
        "# A { #a }\n\n| a |\n|---|\n\nThe first. The second.\n\n"
        "::: forge_core.files\n    options:\n      members: [existing_part]\n"
    )
    (docs / "log.md").write_text("# Log\n\nA day.\n")
    config = {
        "site_name": "Small",
        "site_description": "Three pages.",
        "hooks": [str(ROOT / "docs/plain_pages.py")],
        "nav": ["index.md", {"How-to guides": [{"Inner": [{"Page A": "how-to/a.md"}]}]}, {"Project": ["log.md"]}],
    }
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config))
    build(load_config(str(folder / "mkdocs.yml")))
    return folder / "site"


def test_the_list_has_every_page_below_its_section(site: Path) -> None:
    assert (site / "llms.txt").read_text().splitlines() == [
        "# Small",
        "",
        "> Three pages.",
        "",
        "## Start",
        "",
        "- [Small](index.md): What it is.",
        "",
        "## How-to guides",
        "",
        "- [Page A](how-to/a.md): The first. The second.",
        "",
        "## Optional",
        "",
        "- [Log](log.md): A day.",
    ]


def test_each_page_of_the_list_is_there_as_markdown(site: Path) -> None:
    for path in re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text()):
        assert (site / path).read_text().startswith("# ")
    page = (site / "how-to/a.md").read_text()
    assert page.startswith("# A\n")
    assert "`forge_core.files.existing_part(path: 'Path') -> 'Path'`" in page
    assert "innermost folder above it that exists" in page


def test_the_full_text_has_all_pages_but_those_of_the_project(site: Path) -> None:
    text = (site / "llms-full.txt").read_text()
    assert "The first. The second." in text
    assert "A day." not in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_every_page_can_be_read_as_text(page: Path) -> None:
    """Whatever it includes or documents is there: the site itself leaves out a member that does not exist."""
    assert not LEFT.search(plain_pages.as_text(page.read_text()))


def test_a_member_that_does_not_exist_is_named() -> None:
    with pytest.raises(PluginError, match=r"gone.*forge_core\.files"):
        plain_pages.as_text("::: forge_core.files\n    options:\n      members: [existing_part, gone]\n")


def test_the_site_is_built_with_it() -> None:
    hooks = re.search(r"^hooks: \[(.*)\]$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert hooks is not None
    assert hooks[1].split(", ")[-1] == "docs/plain_pages.py", "last: others generate parts of pages before"
