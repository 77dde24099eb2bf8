"""The documentation for programs that read text: `llms.txt`, `llms-full.txt`, and each page as Markdown.

`llms.txt` is the list of pages of llmstxt.org, `llms-full.txt` has the text of all of them but those of the project
itself. A page `how-to/sft/` is also `how-to/sft.md`, with everything in it that other hooks generate. What mkdocstrings
would fill in is filled in from docstrings here. Links are relative, as the site has no address of its own.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml
from attrs import define, field
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]
OPTIONAL = "Project"
"""Section of the navigation that a reader with little room leaves out."""
INCLUDE = re.compile(r"^--8<--\n(?P<path>.+)\n--8<--\n", re.MULTILINE)
INCLUDE_LINE = re.compile(r'^(?P<indent> *)--8<-- "(?P<path>[^"]+)"$', re.MULTILINE)
FROM_CODE = re.compile(r"^::: (?P<name>[\w.]+)\n(?P<options>(?:(?: {4}.*)?\n)*)", re.MULTILINE)
ANCHOR = re.compile(r" \{ #[\w.-]+ \}")
LONGEST = 240
"""Characters of a summary."""


@define
class Pages:
    """Pages of a build, by their path: filled while pages are rendered, written at its end."""

    texts: dict[str, str] = field(factory=dict)
    sections: list[tuple[str, list[Any]]] = field(factory=list)
    """Title of each section of the navigation, and its pages."""


_pages = Pages()


def on_nav(nav: Any, **_: Any) -> None:
    """Called by mkdocs when it knows the order of the pages: keep it."""
    _pages.texts.clear()
    loose = [item for item in nav.items if item.is_page]
    _pages.sections = [("", loose), *((each.title, list(_pages_of(each))) for each in nav.items if each.is_section)]


def _pages_of(item: Any) -> Iterator[Any]:
    for child in item.children:
        if child.is_page:
            yield child
        elif child.is_section:
            yield from _pages_of(child)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Called by mkdocs for every page, after the hooks that generate parts of it: keep its text."""
    _pages.texts[page.file.src_uri] = as_text(markdown)


def on_post_build(*, config: Any, **_: Any) -> None:
    """Called by mkdocs at the end: write everything next to the pages."""
    site = Path(config["site_dir"])
    for path, text in _pages.texts.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text, encoding="utf-8")
    head = f"# {config['site_name']}\n\n> {config['site_description']}\n"
    (site / "llms.txt").write_text(head + "\n".join(_list_of_pages()), encoding="utf-8")
    (site / "llms-full.txt").write_text(head + "\n".join(_all_pages()), encoding="utf-8")


def _list_of_pages() -> Iterator[str]:
    for title, pages in _pages.sections:
        # llmstxt.org: links below this heading may be left out
        yield f"\n## {'Optional' if title == OPTIONAL else title or 'Start'}\n"
        for page in pages:
            path = page.file.src_uri
            yield f"- [{page.title}]({path}): {summary(_pages.texts[path])}"
    yield ""


def _all_pages() -> Iterator[str]:
    for title, pages in _pages.sections:
        for page in pages if title != OPTIONAL else ():
            yield f"\n<!-- {page.file.src_uri} -->\n\n{_pages.texts[page.file.src_uri]}"


def summary(text: str) -> str:
    """Returns the first sentences of a page, in one line."""
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    paragraphs = (part.strip() for part in body.split("\n\n"))
    first = next((part for part in paragraphs if part and not part.startswith(("#", "<", "|", "```", "![", "[!["))), "")
    plain = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first).split())
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST].rpartition(' ')[0]} …"


def as_text(markdown: str) -> str:
    """Returns a page with files and docstrings in place of what extensions of the site would put there."""
    text = INCLUDE.sub(lambda match: (ROOT / match["path"]).read_text(encoding="utf-8"), markdown)
    text = INCLUDE_LINE.sub(
        lambda match: indent((ROOT / match["path"]).read_text(encoding="utf-8"), match["indent"]), text
    )
    text = FROM_CODE.sub(lambda match: documented(match["name"], match["options"]), text)
    return ANCHOR.sub("", text).rstrip() + "\n"


def documented(name: str, options: str) -> str:
    """Returns signatures and docstrings of a module's members, or of one object.

    Args:
        name: `forge_core.contracts.model`, or `forge_core.contracts.model.Model`.
        options: the block below it, as mkdocstrings reads it; `members` selects.
    """
    members = ((yaml.safe_load(options) or {}).get("options") or {}).get("members")
    target = _find(name)
    if not inspect.ismodule(target):
        return "\n".join(_entry(name, target, members))
    names = members or [each for each in vars(target) if not each.startswith("_") and _is_defined_in(target, each)]
    # mkdocstrings leaves such a member out without a word
    if missing := [each for each in names if not hasattr(target, each)]:
        raise PluginError(f"a page lists {', '.join(missing)} of {name}, which does not have it; correct `members`")
    return "\n".join(line for each in names for line in _entry(f"{name}.{each}", getattr(target, each), None))


def _find(name: str) -> Any:
    """Returns the module or object of a dotted name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        owner, _, attribute = name.rpartition(".")
        return getattr(_find(owner), attribute)


def _is_defined_in(module: Any, name: str) -> bool:
    return getattr(getattr(module, name), "__module__", None) == module.__name__


def _entry(name: str, target: Any, members: list[str] | None) -> Iterator[str]:
    if not (inspect.isclass(target) or callable(target)):
        yield f"### `{name}` = `{target!r}`\n"
        return
    yield f"### `{name}{_signature(target)}`\n"
    yield f"{inspect.getdoc(target) or ''}\n"
    for each, method in vars(target).items() if inspect.isclass(target) else ():
        is_listed = each in members if members else not each.startswith("_")
        if is_listed and inspect.isfunction(method):
            yield f"#### `{each}{_signature(method)}`\n\n{inspect.getdoc(method) or ''}\n"


def _signature(target: Any) -> str:
    try:
        return str(inspect.signature(target))
    except (TypeError, ValueError):  # of some types of C
        return ""
