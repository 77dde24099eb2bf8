"""Parts of the pages that are made from the code when the site is built, so that nothing is written twice.

A page asks for them in comments of one line:

    <!-- generated: overview -->                  the tables of a job, with links to their keys
    <!-- generated: key_kinds -->                 every kind that something is installed of, with links to keys
    <!-- generated: sections -->                  the core's own tables of a job, with their keys
    <!-- generated: components optimizer -->      every installed component of a kind, with its keys
    <!-- generated: commands -->                  every installed command, with its distribution
    <!-- generated: kinds -->                     every kind of the core: base class, what to implement, hook, suite
    <!-- generated: kind optimizer -->            the same of one kind
    <!-- generated: plugin_kinds -->              every kind that an installed plugin declares
    <!-- generated: hooks -->                     every hook of the core
    <!-- generated: events -->                    every event of a run, for training hooks
    <!-- generated: screen forge-run --help -->   a command and what it prints
    <!-- generated: notebook first_run -->        the cells of a notebook of `docs/notebooks/`, in order
    <!-- generated: names axolotl -->             names of keys in another trainer, and here

Every kind that something is installed of has a page of its own, which no file holds: `key_pages`.
"""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from generated_kinds import core_kinds, event_rows, facts, hook_rows, kind_rows, plugin_kind_rows
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from forge_core.cli import command_summary, main
from forge_core.config.field_types import component_in, header, is_section, type_name
from forge_core.config.tree import hints
from forge_core.contracts.components import Component
from forge_core.job import Job
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.documented_keys import Key, class_doc, keys_of, one_paragraph
from forge_plugin_author.error_ids import error_kinds
from forge_plugin_author.explain import section_in

COMMENT = re.compile(r"^<!-- generated: (\w+) ?(.*?) -->$", re.MULTILINE)
NO_COMPONENTS = ("kind", "command")
NOTEBOOKS = Path(__file__).with_name("notebooks")
PLUGINS = Path(__file__).parents[1] / "plugins"
OVERVIEW, SECTIONS = "/reference/keys.md", "/reference/keys/sections.md"
NAVIGATION = ("Reference", "Every key")
"""Section of the navigation, and the one inside it, that lists the kinds."""


def on_config(config: Any, **_: Any) -> Any:
    """Called by mkdocs before it looks for pages: list the kinds in the navigation."""
    outer, inner = NAVIGATION
    for item in (item for entry in config["nav"] for item in entry.get(outer, ())):
        if inner in item:
            item[inner].extend({Path(page).stem: page} for page in key_pages())
    return config


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Called by mkdocs with the pages of the folder `docs`: add one for each kind."""
    for page, text in key_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page: put what was asked for in place of each comment."""
    root = "../" * page.file.src_uri.count("/")
    return COMMENT.sub(lambda match: MAKERS[match[1]](match[2]).replace("](/", f"]({root}"), markdown)


def key_pages() -> dict[str, str]:
    """Returns the page of each kind that something is installed of, with its text in Markdown."""
    return {_kind_page(kind).removeprefix("/"): _kind_page_text(kind) for kind in _kinds_in_jobs(Catalog.installed())}


def _kinds_in_jobs(catalog: Catalog) -> list[str]:
    return [kind for kind in catalog.types("kind") if catalog.offers(kind) and kind not in NO_COMPONENTS]


def _kind_page(kind: str) -> str:
    return f"/reference/keys/{kind}.md"


def _kind_page_text(kind: str) -> str:
    title = f"---\ntitle: Keys of the kind {kind}\n---\n\n# Kind `{kind}` {{ #kind-{kind} }}"
    return f"{title}\n\n<!-- generated: components {kind} -->\n"


def component_link(kind: str, type_: str) -> str:
    """A link to the keys of a component."""
    return f"[`{type_}`]({_kind_page(kind)}#{kind}.{type_})"


def overview(_: str) -> str:
    """The table of all sections. A row has the anchor that its section has on the page of the sections."""
    rows = [_cells(key, _section_name(path, key)) for path, key in _all_sections(Job)]
    return table(("section", "value", "default", "meaning"), rows)


def _all_sections(cls: type, above: str = "") -> Iterator[tuple[str, Key]]:
    """The keys of a job, and below each those that are sections inside it, with their paths."""
    for key in keys_of(cls):
        section, path = section_in(key.type), above + key.name
        if section is not None or not above:
            yield path, key
        if section is not None:
            yield from _all_sections(section, f"{path}.")


def _section_name(path: str, key: Key) -> str:
    if section_in(key.type) is None:
        return f"`[{path}]`"
    return f"[`{header(path, key.type)}`]({SECTIONS}#{path}){{ #{path} }}"


def key_kinds(_: str) -> str:
    """Every kind that something is installed of. A link has the anchor of its component on the page of the kind."""
    catalog = Catalog.installed()
    return table(("kind", "what for", "types"), [_key_kind(kind, catalog) for kind in _kinds_in_jobs(catalog)])


def _key_kind(kind: str, catalog: Catalog) -> Sequence[str]:
    offers = catalog.offers(kind)
    types = [f"{component_link(kind, offer.type)}{{ #{kind}.{offer.type} }}" for offer in offers]
    purpose = one_paragraph(class_doc(catalog.kind_base(kind)))
    return f"[`{kind}`]({_kind_page(kind)}){{ #kind-{kind} }}", purpose, ", ".join(types)


def sections(_: str) -> str:
    """For each section that is the core's own, and for those inside it, what it is for and the table of its keys."""
    return "\n\n".join(part for path, key in _all_sections(Job) for part in _section(path, key))


def _section(path: str, key: Key) -> Iterator[str]:
    section = section_in(key.type)
    if section is not None:
        title = header(path, key.type)
        yield f"{'###' if '.' in path else '##'} `{title}` {{ #{path} }}"
        yield _section_doc(title, section)
        yield keys_table(section)


def _section_doc(title: str, cls: type) -> str:
    text = class_doc(cls).removeprefix(f"`{title}`: ")
    return text[:1].upper() + text[1:]


def components(kind: str) -> str:
    """What a kind is for, and for each installed type its description, its package and the table of its keys."""
    catalog = Catalog.installed()
    more = f"[Write one](/ten-minutes/{kind}.md) in ten minutes." if kind in core_kinds(catalog) else ""
    about = f"{one_paragraph(class_doc(catalog.kind_base(kind)))} {more} [All kinds]({OVERVIEW}#kinds)."
    return "\n\n".join([" ".join(about.split()), *_components(kind, catalog)])


def _components(kind: str, catalog: Catalog) -> Iterator[str]:
    for offer in catalog.offers(kind):
        cls = catalog.load(kind, offer.qualified)
        yield f"## `{offer.type}` {{ #{kind}.{offer.type} }}"
        yield f"{class_doc(cls)}\n\nFrom {_distribution_link(offer.distribution.name)}."
        yield keys_table(cls)


def _distribution_link(name: str) -> str:
    """The name of a distribution, linked to its README if that is a page of the site."""
    link = f"(/plugins/{name}.md)" if (PLUGINS / name / "README.md").exists() else ""
    return f"[`{name}`]{link}" if link else f"`{name}`"


def commands(_: str) -> str:
    """Every installed command, what it does, and its distribution; linked to its section of the page."""
    sections = set(re.findall(r"\{ #([\w-]+) \}", Path(__file__).with_name("command-line.md").read_text()))
    rows = []
    for offer in Catalog.installed().offers("command"):
        anchor = offer.type.replace(" ", "-")
        name = f"[`{offer.type}`](#{anchor})" if anchor in sections else f"`{offer.type}`"
        rows.append((name, command_summary(offer.value)[1], _distribution_link(offer.distribution.name)))
    return table(("command", "", "distribution"), rows)


def kinds(_: str) -> str:
    """Every kind of the core."""
    head = ("kind", "base class", "to implement", "hook around it", "suite")
    return table(head, kind_rows(Catalog.installed()))


def kind(name: str) -> str:
    """The same of one kind, a fact in a row, and what is installed of it."""
    return table((f"kind `{name}`", ""), facts(name, Catalog.installed()))


def plugin_kinds(_: str) -> str:
    """Every kind that an installed plugin declares."""
    return table(("kind", "what for", "to implement", "declared by"), plugin_kind_rows(Catalog.installed()))


def hooks(_: str) -> str:
    """Every hook of the core."""
    return table(("hook", "arguments", "result", "when, and what for"), hook_rows())


def events(_: str) -> str:
    """Every event of a run."""
    return table(("event", "arguments", "when"), event_rows())


def screen(command: str) -> str:
    """A command as one types it, and what it prints."""
    os.environ["COLUMNS"] = "100"
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            code: str | int = main(shlex.split(command)[1:])
    except SystemExit as exit_:  # argparse, after --help
        code = exit_.code or 0
    if code:
        raise PluginError(f"the page asks for `{command}`, which ends with exit code {code}")
    return f"```console\n$ {command}\n{output.getvalue().rstrip()}\n```"


def names(trainer: str) -> str:
    """The keys of another trainer, each with its name here, as messages about unknown keys have them."""
    answers: dict[str, list[str]] = {}
    for name, answer in hints("keys")[trainer].items():
        answers.setdefault(answer, []).append(f"`{name or '-'}`")
    return table(("There", "Forge"), [(", ".join(each), answer) for answer, each in answers.items()])


def error_ids(_: str) -> str:
    """Ids of errors, each with its meaning, the fix, and the page with more."""
    rows = [(f"`{each.id}`", each.meaning, f"{each.fix} [More](/{each.page})") for each in error_kinds().values()]
    return table(("id", "meaning", "fix"), rows)


def notebook(name: str) -> str:
    """The cells of a notebook that is written as a script, in the format "py:percent" of Jupytext and editors."""
    cells = re.split(r"^# %%(.*)\n", (NOTEBOOKS / f"{name}.py").read_text(), flags=re.MULTILINE)[1:]
    pairs = zip(cells[::2], cells[1::2], strict=True)
    return "\n\n".join(_markdown_cell(text) if "markdown" in kind else _code_cell(text) for kind, text in pairs)


def _markdown_cell(text: str) -> str:
    return re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE)


def _code_cell(text: str) -> str:
    return f"```python\n{text.strip()}\n```"


def keys_table(cls: type) -> str:
    """The keys of a section or component."""
    keys = keys_of(cls)
    if not keys:
        return "It has no keys."
    return table(("key", "value", "default", "meaning"), [_cells(key, f"`{key.name}`") for key in keys])


def _cells(key: Key, name: str) -> Sequence[str]:
    doc = key.doc or (_section_doc(f"[{key.name}]", key.type) if is_section(key.type) else "")
    doc = re.sub(r"^`\[+[\w.]+\]+`: ", "", doc)  # the row begins with its name already
    return name, _value(key), _default(key), " ".join(doc.split())


def _value(key: Key) -> str:
    base = component_in(key.type)
    name = type_name(key.type)
    if base is not None:
        name = name.replace(f"{base.kind} table", _link(base))
    limits = [demand.text.removeprefix("be ").replace("[", "\\[") for demand in key.demands if demand.text]
    return ", ".join([name, *limits])


def _link(base: type[Component]) -> str:
    text = f"{base.kind} table"
    return f"[{text}]({_kind_page(base.kind)})" if Catalog.installed().types(base.kind) else text


def _default(key: Key) -> str:
    if key.required:
        return "required"
    return f"`{key.default_text}`" if key.default_text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Text whose bars do not end the cell; those in code do not anyway."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("|", "&#124;") for part in parts)


MAKERS = {
    "overview": overview,
    "key_kinds": key_kinds,
    "sections": sections,
    "components": components,
    "commands": commands,
    "kinds": kinds,
    "kind": kind,
    "plugin_kinds": plugin_kinds,
    "hooks": hooks,
    "events": events,
    "screen": screen,
    "names": names,
    "error_ids": error_ids,
    "notebook": notebook,
}
