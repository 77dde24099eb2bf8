"""Dataset `python_stdlib`: real text on every machine, without a download."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path, PurePath

from attrs import frozen

from forge_core.contracts.errors import JobError
from forge_kit.data.data_files import FileFinder
from forge_plugin_text.listing import TextFile
from forge_plugin_text.source import CorpusDataset

EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}
)
"""Tests, packages installed later, and `encodings`, which is nearly all generated tables."""
EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize", "_distutils_system_mod")
"""Files that describe the build or configuration of one interpreter."""

STANDARD = "standard"
"""Value of `held_out_list` for the list of this plugin; a file of this name is `./standard`."""
STANDARD_LIST = "python_stdlib.heldout.txt"


@frozen(kw_only=True)
class PythonStdlib(CorpusDataset):
    """The `.py` files of the running interpreter's standard library: about 10 MB of text in 600 documents.

    Tests, installed packages, the tables of `encodings`, and files that depend on the machine are left out. A document
    is named by its path below the library (`json/decoder.py`). Other versions of Python have other files; a held-out
    list made with one of them applies to the names that remain. `held_out_list = "standard"` is the list that comes
    with this plugin: every 20th file of CPython 3.11.7, which the quickstart and the speedrun hold out.
    """

    def files(self) -> tuple[TextFile, ...]:
        """Lists the `.py` files of the running interpreter's library, each named by its path below it."""
        root = sysconfig.get_path("stdlib")
        candidates = FileFinder().walk(root, EXCLUDED_FOLDERS)
        paths = [path for path in candidates if path.endswith(".py") and _is_general(path, root)]
        files = [TextFile(PurePath(path).relative_to(root).as_posix(), path) for path in paths]
        if not files:
            raise JobError(
                f"the standard library has no .py files in {root!r}; use a Python installed with its sources"
            )
        return tuple(sorted(files, key=lambda file: file.name))

    @property
    def _list_path(self) -> Path:
        # Shipped with the plugin, so that a job that names it can be started in any folder
        return Path(__file__).with_name(STANDARD_LIST) if self.held_out_list == STANDARD else super()._list_path


def _is_general(path: str, root: str) -> bool:
    """Whether the file belongs to the library in every installation."""
    return not os.path.relpath(path, root).startswith(EXCLUDED_PREFIXES)
