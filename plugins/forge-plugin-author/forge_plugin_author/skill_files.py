"""Skills for coding assistants, in the open format of agentskills.io: those that are shipped, and their installation.

A skill is a folder with a `SKILL.md`, whose head names it and states when to use it, and files that it refers to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core.contracts.errors import JobError, did_you_mean, listed
from forge_core.files import write_atomically

SHIPPED = Path(__file__).with_name("skills")
MAIN = "SKILL.md"
RECORD = ".forge-skills.json"
"""File in the folder of an assistant that records what was installed there, with SHA-256 and versions."""
TARGETS: Mapping[str, str] = {"agents": ".agents/skills", "claude": ".claude/skills", "codex": ".agents/skills"}
"""Folders of a project in which assistants look for skills. Codex reads the one that assistants share."""
HEAD_MARK = "---\n"


@frozen
class Skill:
    """A shipped skill.

    `packages` are the distributions whose commands and components it uses.
    """

    name: str
    description: str
    packages: Sequence[str]
    folder: Path

    def files(self) -> Mapping[Path, str]:
        """Returns the text of each file, by its path below the folder of skills."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {path.relative_to(self.folder.parent): path.read_text(encoding="utf-8") for path in paths}

    def missing(self) -> list[str]:
        """Returns the distributions that it needs and that are not installed."""
        return [name for name in self.packages if installed_version(name) is None]


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None; also of one that offers nothing to jobs."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def shipped_skills() -> list[Skill]:
    """Returns all skills of this distribution, by name."""
    return [read_skill(path.parent) for path in sorted(SHIPPED.glob(f"*/{MAIN}"))]


def read_skill(folder: Path) -> Skill:
    """Returns the skill in a folder."""
    head = head_of((folder / MAIN).read_text(encoding="utf-8"))
    return Skill(head["name"], head["description"], head["packages"].split(), folder)


def head_of(text: str) -> Mapping[str, str]:
    """Returns the keys in the head of a `SKILL.md`, with the ones below `metadata`.

    Heads of shipped skills have one line for each key, so that no parser of YAML is needed; a test reads them by one.
    """
    lines = text.split(HEAD_MARK, 2)[1].splitlines()
    pairs = (line.strip().partition(": ") for line in lines)
    return {key: value.strip('"') for key, _, value in pairs}


def select_skills(names: Iterable[str]) -> list[Skill]:
    """Returns the skills with these names, or all without any.

    Raises:
        JobError: no skill is called so; the message has the closest name, or all.
    """
    skills = {skill.name: skill for skill in shipped_skills()}
    for name in names:
        if name not in skills:
            hint = did_you_mean(name, skills) or f"; there are {', '.join(skills)}"
            raise JobError(f"forge-run skills: no skill is called {name!r}{hint}")
    return [skills[name] for name in names] or [*skills.values()]


# --- installing ------------------------------------------------------------------------------------------------------


def target_folder(target: str) -> Path:
    """Returns the folder of skills of an assistant in the working directory, or the folder that was given."""
    return Path(TARGETS.get(target, target)).expanduser()


def install(skills: Sequence[Skill], folder: Path, *, overwrite: bool = False) -> None:
    """Write skills into a folder, and record them with their digests and the versions of the packages that they use.

    Files that were installed before and are unchanged are replaced. Nothing is written if one is refused.

    Args:
        skills: what to install.
        folder: where; it is made.
        overwrite: whether files that somebody has changed, or that are of others, are replaced as well.

    Raises:
        JobError: such files are there, without `overwrite`, or the folder cannot be written.
    """
    names = sorted({name for skill in skills for name in skill.packages})
    versions = {name: version for name in names if (version := installed_version(name))}
    files = {path: with_versions(text, versions) for skill in skills for path, text in skill.files().items()}
    known = read_record(folder).get("files", {})
    # A file is free to be replaced if it is still as an earlier installation wrote it, or is what would be written
    changed = [
        str(folder / path)
        for path, text in files.items()
        if (there := _digest_of(folder / path)) and there not in (known.get(str(path)), _digest(text.encode()))
    ]
    if changed and not overwrite:
        raise JobError(
            f"forge-run skills install: changed since it was installed, or not from Forge: {listed(changed)}; "
            "move your changes elsewhere, name other skills, or give --overwrite"
        )
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / path, text)
        digests = known | {str(path): _digest(text.encode()) for path, text in files.items()}
        write_atomically(folder / RECORD, json.dumps({"packages": versions, "files": digests}, indent=2) + "\n")
    except OSError as error:
        raise JobError(f"forge-run skills install: {folder} cannot be written: {error.strerror}") from None


def with_versions(text: str, versions: Mapping[str, str]) -> str:
    """Returns a `SKILL.md` whose head has the versions of the packages that it names; other texts as they are."""
    if not text.startswith(HEAD_MARK):
        return text
    names = head_of(text)["packages"]
    having = " ".join(f"{name}=={versions[name]}" if name in versions else name for name in names.split())
    # The first occurrence is in the head, which comes before the text
    return text.replace(names, having, 1)


def read_record(folder: Path) -> Mapping[str, Any]:
    """Returns what earlier installations into a folder have recorded; empty without any.

    Raises:
        JobError: the record cannot be read.
    """
    path = folder / RECORD
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise JobError(f"forge-run skills install: {path} cannot be read: {error}; remove it to start again") from None


def _digest_of(path: Path) -> str:
    """SHA-256 of a file, or of the name of what else is there; empty if nothing is."""
    if path.is_file():
        return _digest(path.read_bytes())
    return "no file" if path.exists() else ""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
