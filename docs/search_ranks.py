"""Order of the search results: tutorials and how-to guides before what is generated from code."""

from __future__ import annotations

from typing import Any

GUIDES = ("Tutorials", "How-to guides")
"""Sections of the navigation whose pages come first."""
FIRST: dict[str, Any] = {"boost": 2}
GENERATED: dict[str, Any] = {"boost": 0.5}
PROSE = ("reference/json.md",)
"""Pages of the reference that are written, not generated."""
HALF = ("testing.md", "training-hooks.md")
"""Guides of which docstrings are the greater part."""
NOT_FOUND = ("log.md",)


def on_page_markdown(_markdown: str, *, page: Any, **_: Any) -> None:
    """Called by mkdocs for every page: set the rank of a page whose front matter sets none."""
    if found := rank(page.file.src_uri, [section.title for section in page.ancestors]):
        page.meta.setdefault("search", found)


def rank(path: str, above: list[str]) -> dict[str, Any]:
    """Returns the search settings of a page, empty for the usual ones; `above` are its sections of the navigation."""
    if path in NOT_FOUND:
        return {"exclude": True}
    if path.startswith("reference/") and path not in PROSE:
        return GENERATED
    return FIRST if set(above) & set(GUIDES) and path not in HALF else {}
