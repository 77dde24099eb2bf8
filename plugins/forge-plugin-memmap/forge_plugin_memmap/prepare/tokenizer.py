"""The tokenizer of a command: chosen by its arguments, made once, saved in the output folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from forge_core.config.load import to_toml
from forge_core.contracts.components import TokenizerComponent
from forge_core.contracts.contexts import BuildContext
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.contracts.layout import Layout
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.commands import load_component
from forge_plugin_memmap.manifest import TOKENIZER
from forge_plugin_memmap.tokenizer_folder import NO_RUN, KeptTokenizer, load_kept


def choose_tokenizer(job: Iterable[str], type_: str | None, keys: Iterable[str]) -> TokenizerComponent:
    """Returns the tokenizer's component.

    Args:
        job: job files whose table `[data.tokenizer]` it is; or else
        type_: its type, or a `tokenizer.json`, and
        keys: `tokenizer.key=value`.

    Raises:
        JobError: there is none of this type, or a key is wrong.
    """
    paths = list(job)
    if type_ is not None and type_.endswith(".json"):
        # A path stands for the type `file` with that path as its key.
        keys, type_ = [f"tokenizer.path={type_!r}", *keys], "file"
    given = [] if type_ is None else [f"tokenizer.type={type_!r}", *keys]
    table = "data.tokenizer" if paths else "tokenizer"
    component = load_component(table, TokenizerComponent, Catalog.installed(), paths, given)
    problems = [problem.below(table) for problem in component.problems(NO_RUN, Layout())]
    if problems:
        raise JobError(problems)
    return component


def build_tokenizer(component: TokenizerComponent, documents: Callable[[], Iterable[str]]) -> KeptTokenizer:
    """Returns the tokenizer of a component.

    Args:
        component: of the tokenizer.
        documents: returns a new iterable over the texts of the training split at each call.
    """
    built = component.build(cast(BuildContext, NO_RUN), documents)
    # One that was kept before has the table of the component that made it
    return built if isinstance(built, KeptTokenizer) else KeptTokenizer(built, to_toml(component, Catalog.installed()))


def keep_tokenizer(output: Path, made: KeptTokenizer) -> KeptTokenizer:
    """Save a tokenizer in the output folder, and load it from there.

    Raises:
        ForgeError: the saved tokenizer is not the same one.
    """
    folder, unfinished = output / TOKENIZER, output / f"{TOKENIZER}.tmp"
    # Renamed into place when it is complete: a folder of this name always holds a whole tokenizer.
    for leftover in (unfinished, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir()
    made.save(unfinished)
    unfinished.rename(folder)
    # Workers and later runs load it, so the loaded one must encode the same.
    loaded = load_kept(folder)
    if loaded.fingerprint() != made.fingerprint():
        message = f"the tokenizer loaded from {folder} is not the one that was saved there"
        raise ForgeError(f"{message}: an error of {made.table['type']}")
    return loaded
