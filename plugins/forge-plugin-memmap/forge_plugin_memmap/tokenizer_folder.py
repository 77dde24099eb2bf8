"""Tokenizers kept in a folder together with the table of their component, which is needed to load them.

component.json      the table, as a job has it, every key filled in
files/              what the tokenizer's own `save` wrote
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from forge_core.contracts.components import TokenizerComponent
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.data import Tokenizer
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import parse_component

COMPONENT, FILES = "component.json", "files"


class NoRun:
    """Stands for the job and the context of a run, where there is none."""

    def __getattr__(self, name: str) -> Any:
        # Python itself looks for special methods, and expects AttributeError where there is none
        if name.startswith("__"):
            raise AttributeError(name)
        raise ForgeError(f"this tokenizer depends on the run that it is used in ({name!r}): it cannot prepare data")


NO_RUN: Any = NoRun()


class KeptTokenizer:
    """A tokenizer that stores its component's table; see `forge_core.contracts.data.Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer, table: Mapping[str, Any]) -> None:
        self.tokenizer, self.table = tokenizer, table
        self.vocab_size, self.end_of_text = tokenizer.vocab_size, tokenizer.end_of_text
        # Other members of a tokenizer (a beginning of text, chats) belong to protocols of plugins not known here.
        for name in dir(tokenizer):
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, getattr(tokenizer, name))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer.encode_batch(texts)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def save(self, folder: Path) -> None:
        """Writes `component.json`, and the tokenizer's own files to `files/`."""
        (folder / COMPONENT).write_text(json.dumps(self.table, indent=1, ensure_ascii=False), "utf-8")
        (folder / FILES).mkdir()
        self.tokenizer.save(folder / FILES)

    def fingerprint(self) -> str:
        """Returns the fingerprint of the tokenizer itself, so that a job may name that one, too."""
        return self.tokenizer.fingerprint()


def load_kept(folder: Path | str) -> KeptTokenizer:
    """The tokenizer that `KeptTokenizer.save` put there.

    Raises:
        JobError: it is not there, or its distribution is not installed.
    """
    path = Path(folder, COMPONENT)
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise JobError(f"{path} cannot be read ({error}); the folder does not hold a tokenizer") from error
    component = parse_component(table, str(path), TokenizerComponent, Catalog.installed())
    return KeptTokenizer(component.load(cast(BuildContext, NO_RUN), Path(folder, FILES)), table)
