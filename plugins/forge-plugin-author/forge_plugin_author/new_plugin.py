"""`forge-run new-plugin`: writes a distribution to start from, for each kind of the core.

The templates are distributions themselves, in `templates/KIND`; files of all kinds are in `templates/every`. Names in
them are placeholders: `template_name` for the type, `TemplateName` for the class, `template-name` for the distribution.
"""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from forge_core.cli.command_line import with_examples
from forge_core.contracts.errors import ExitCode, JobError, did_you_mean
from forge_core.plugins.catalog import CORE, Catalog, core_version

TEMPLATES = Path(__file__).parent / "templates"
EVERY = "every"
"""The folder of files that all kinds share."""
TYPE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
LONGEST = 30
"""Upper bound of the characters of a name: lines of the templates have room for as many."""


HEADING = "extend"


def command(argv: list[str]) -> int:
    """Write a new plugin: a working component, tests, README, job."""
    parser = argparse.ArgumentParser("forge-run new-plugin", description=command.__doc__)
    parser.add_argument("kind", metavar="KIND", help=f"what it offers: {', '.join(kinds())}")
    parser.add_argument("name", metavar="NAME", help="the type that jobs will use: my_optimizer")
    parser.add_argument(
        "--dir", type=Path, default=Path(), metavar="PATH", help="where to make the folder forge-plugin-NAME (here)"
    )
    with_examples(
        parser, "forge-run new-plugin optimizer my_optimizer", "forge-run new-plugin hook watch --dir plugins"
    )
    options = parser.parse_args(argv)
    catalog = Catalog.installed()
    # All files are filled in before the first is written, so that an error leaves nothing behind
    files = distribution_files(options.kind, options.name, catalog)
    folder = options.dir.expanduser() / distribution_name(options.name)
    write(files, folder)
    for warning in taken(options.kind, options.name, catalog):
        print(f"warning: {warning}", file=sys.stderr)
    print("\n".join(farewell(files, folder)))
    return ExitCode.FINISHED


def kinds() -> list[str]:
    """Returns the kinds with a template."""
    return sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir() and path.name != EVERY)


def distribution_name(name: str) -> str:
    """Returns the name of the distribution that offers the type `name`."""
    return f"forge-plugin-{name.replace('_', '-')}"


def distribution_files(kind: str, name: str, catalog: Catalog) -> Mapping[Path, str]:
    """Returns the files of a new distribution, by their paths in it.

    Raises:
        JobError: the kind has no template, or the name is not allowed; the message gives the allowed ones.
    """
    check_kind(kind, catalog)
    templates = {path: source.read_text(encoding="utf-8") for path, source in template_files(kind)}
    check_name(kind, name, templates)
    # Only what the template imports is required
    requirements = [CORE, *(["forge-kit"] if any("forge_kit" in text for text in templates.values()) else [])]
    filled = partial(_filled, kind=kind, name=name, requirements=requirements)
    return {Path(filled(str(path))): filled(text) for path, text in templates.items()}


def template_files(kind: str) -> Iterator[tuple[Path, Path]]:
    """Yields the files of a template: path in the distribution, and path of the source."""
    for folder in (TEMPLATES / EVERY, TEMPLATES / kind):
        for source in sorted(folder.rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts:
                yield source.relative_to(folder), source


def check_kind(kind: str, catalog: Catalog) -> None:
    """Refuse a kind without a template.

    Raises:
        JobError: the message names the distribution that declares the kind, or all kinds.
    """
    if kind in kinds():
        return
    owners = [str(offer.distribution) for offer in catalog.offers("kind") if offer.type == kind]
    if owners:
        why = f"kind {kind!r} is declared by {' and '.join(owners)}, and there are templates for kinds of {CORE} only"
        raise _refused(f"{why}; see how that distribution documents it")
    hint = did_you_mean(kind, kinds()) or f". Kinds: {', '.join(kinds())}"
    raise _refused(f"there is no kind {kind!r}{hint}")


def check_name(kind: str, name: str, templates: Mapping[Path, str]) -> None:
    """Refuse a name that is not allowed for a type, or that the sources would use for two things.

    Raises:
        JobError: the name is refused; the message states the rule that it breaks.
    """
    if not TYPE.fullmatch(name):
        allowed = "small letters, digits and single underscores between them, a letter first"
        hint = f"; take {plain!r}" if (plain := _plain(name)) else ""
        raise _refused(f"{name!r} is no name for a type: {allowed}{hint}")
    if keyword.iskeyword(name):
        raise _refused(f"{name!r} is a keyword of Python, and would be the name of a module; take 'my_{name}'")
    if len(name) > LONGEST:
        raise _refused(f"{name!r} has {len(name)} characters; {LONGEST} are allowed")
    modules = {path.stem for path in templates if path.suffix == ".py"}
    words = {word for path, text in templates.items() if path.suffix == ".py" for word in re.findall(r"\w+", text)}
    clashes = {f"a module {name!r}": name in modules, f"a {class_name(name)!r}": class_name(name) in words}
    for other, is_used in clashes.items():
        if is_used:
            raise _refused(f"{name!r} cannot be told from {other} that a new {kind} has already; take 'my_{name}'")


def _plain(name: str) -> str:
    """Returns the closest allowed name: `MyOptimizer-2` -> `my_optimizer_2`."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
    return "_".join(words).lstrip("0123456789_")


def class_name(name: str) -> str:
    """Returns the name of the class: `my_optimizer` -> `MyOptimizer`."""
    return "".join(part.capitalize() for part in name.split("_"))


def _filled(text: str, kind: str, name: str, requirements: Sequence[str]) -> str:
    major, minor = core_version().split(".")[:2]
    version = f">={major}.{minor},<{major}.{int(minor) + 1}"
    for placeholder, value in (
        ("template-name", name.replace("_", "-")),
        ("template_name", name),
        ("TemplateName", class_name(name)),
        ("template_kind", kind),
        ('"template_requirement"', ", ".join(f'"{distribution}{version}"' for distribution in requirements)),
    ):
        text = text.replace(placeholder, value)
    return text


def write(files: Mapping[Path, str], folder: Path) -> None:
    """Write the files into a new folder.

    Raises:
        JobError: the folder exists, or cannot be written.
    """
    try:
        folder.mkdir(parents=True)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise _refused(f"{error.filename} exists already, and nothing is overwritten; choose another --dir") from error
    except OSError as error:
        raise _refused(f"cannot write {error.filename}: {error.strerror}; choose another --dir") from error


def taken(kind: str, name: str, catalog: Catalog) -> Iterator[str]:
    """Yields warnings about installed distributions and types of the same name."""
    for offer in catalog.offers(kind):
        if offer.type == name:
            hint = f"jobs with both installed must write {distribution_name(name)}/{name}"
            yield f"{kind} {name!r} is offered by {offer.distribution} too, so that {hint}"
    installed = catalog.distribution(distribution_name(name))
    if installed is not None:
        yield f"{installed} is installed already; installing the new one replaces it"


def farewell(files: Mapping[Path, str], folder: Path) -> Iterator[str]:
    """Yields the written files, and the commands to try them."""
    yield f"wrote {folder}:"
    yield from (f"  {path}" for path in sorted(files))
    yield ""
    yield "install it, run its tests, and train with it:"
    yield f"  cd {shlex.quote(str(folder))}"
    yield "  pip install -e . pytest"
    yield "  pytest"
    yield "  forge-run job.toml"


def _refused(message: str) -> JobError:
    return JobError(f"forge-run new-plugin: {message}")
