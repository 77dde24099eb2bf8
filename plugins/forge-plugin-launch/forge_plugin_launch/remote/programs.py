"""Programs of clusters: how they are asked, with their own words for what went wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from attrs import frozen

from forge_core.contracts.errors import JobError

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@frozen
class Program:
    """A program of a cluster."""

    name: str
    """As on the PATH."""
    install: str
    """The command line that installs it."""

    def path(self) -> str:
        """Its path.

        Raises:
            JobError: it is not on the PATH; with the line that installs it.
        """
        if path := shutil.which(self.name):
            return path
        raise JobError(f"{self.name} is not on the PATH: {self.install}; --print needs none")

    def ask(self, *words: str, text: str = "", work: Path | None = None) -> str:
        """Run the program and return what it prints.

        Args:
            words: of the command line. No secrets: all users of a machine see them.
            text: for its standard input.
            work: its working directory; None: this one.

        Raises:
            JobError: it failed, in its own words.
        """
        command = [self.path(), *words]
        done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=work, check=False)
        if done.returncode:
            # Some print their errors to standard output
            said = _COLOURS.sub("", done.stderr.strip() or done.stdout.strip())
            raise JobError(f"{self.name} {words[0]} failed ({done.returncode}): {said or 'it printed nothing'}")
        return done.stdout

    def show(self, *words: str) -> int:
        """Run the program with this process's output; returns its exit code."""
        return subprocess.run([self.path(), *words], stdin=subprocess.DEVNULL, check=False).returncode


def json_in(text: str, of: str) -> Any:
    """The first JSON document that begins a line: some programs print warnings before it.

    Raises:
        JobError: there is none.
    """
    # A warning may contain brackets, too: the document is what can be read from there on
    for begin in re.finditer(r"^[\[{]", text, re.MULTILINE):
        try:
            return json.JSONDecoder().raw_decode(text[begin.start() :])[0]
        except json.JSONDecodeError:
            continue
    raise JobError(f"{of} printed no JSON: {text.strip()[:200] or 'nothing'}")
