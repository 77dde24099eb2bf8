"""Pages of the site that are files elsewhere in the repository: the README of every plugin, the changelog."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
REFERENCE = "Reference"
"""Section of the navigation that lists the plugins."""
LINK = re.compile(r"\]\((?P<path>(?!https?:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_config(config: Any, **_: Any) -> Any:
    """Called by mkdocs before it looks for pages: list the plugins in the navigation."""
    plugins = [page for page in pages().values() if page.startswith("plugins/")]
    for entry in config["nav"]:
        if REFERENCE in entry:
            entry[REFERENCE].append({"Plugins": plugins})
    return config


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Called by mkdocs with the pages of the folder `docs`: add the others."""
    for source, page in pages().items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=with_links_to_pages(text, source, page)))
    return files


def pages() -> dict[str, str]:
    """Returns the page of each file, both relative: one to the repository, the other to the site."""
    names = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/README.md"))
    plugins = {f"plugins/{name}/README.md": f"plugins/{name}.md" for name in names}
    return {name: name.lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")} | plugins


def with_links_to_pages(text: str, source: str, page: str) -> str:
    """Returns the text of a file with its links to other files as links between pages.

    Raises:
        ValueError: it links to a file that is no page of the site.
    """
    known = pages() | {"README.md": "index.md"}

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["path"]))
        found = known.get(target) or known.get(f"{target}/README.md")
        if target.startswith("docs/"):
            found = target.removeprefix("docs/")
        if found is None:
            raise ValueError(f"{source} links to {match['path']}, which is no page of the site")
        return f"]({posixpath.relpath(found, posixpath.dirname(page) or '.')}{match['anchor'] or ''})"

    return LINK.sub(replaced, text)
