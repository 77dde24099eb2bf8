"""A prompt on the terminal, or lines of a file, answered one after the other, with commands that begin with a slash."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from forge_core.contracts.errors import ExitCode, ForgeError, did_you_mean
from forge_plugin_generate.options import SETTINGS

MARK = "> "
"""The prompt for input on a terminal."""
HISTORY = 1000
"""Lines that are remembered from one conversation to the next."""

Commands = Mapping[str, tuple[str, Callable[[str], object]]]
"""Commands by name: the description for `/help`, and a function that is called with the rest of the line."""


def write(text: str) -> None:
    """Write a piece of an answer at once."""
    print(text, end="", flush=True)


class Conversation:
    """Reads lines until the input ends, answers each, and obeys commands.

    Ctrl-C ends an answer, or empties the line that is typed; Ctrl-D leaves. An input that is no terminal has no mark
    before its lines, and its first error ends it.

    Args:
        options: settings of the sampling, which commands change.
        answer: writes the answer to a line.
        commands: further commands.
    """

    def __init__(self, options: argparse.Namespace, answer: Callable[[str], object], commands: Commands) -> None:
        self._options, self._answer = options, answer
        self._on_terminal = sys.stdin.isatty()
        self._commands: Commands = {
            "help": ("this list", lambda text: self._help()),
            **commands,
            **{name: (_setting_help(name), self._setter(name)) for name in SETTINGS},
            "exit": ("leave, as Ctrl-D does", self._leave),
        }

    def run(self) -> int:
        """Answer until the input ends; returns the exit code of the command."""
        with _history(self._on_terminal):
            for line in self._lines():
                try:
                    # `//` begins a message that begins with a slash
                    self._obey(line[1:]) if line.startswith("/") and not line.startswith("//") else self._reply(line)
                except EOFError:  # raised by /exit; `_lines` handles the end of the input
                    break
                except ForgeError as error:
                    # Only a person can correct the line; a script must see the exit code
                    if not self._on_terminal:
                        raise
                    print(f"forge-run: {error}", file=sys.stderr)
                except KeyboardInterrupt:
                    print(flush=True)  # the answer ends here; later output begins on a new line
                    if not self._on_terminal:
                        return ExitCode.SECOND_SIGNAL
        return ExitCode.FINISHED

    def _lines(self) -> Iterator[str]:
        """Yields the lines that are not blank, without their ends."""
        mark = MARK if self._on_terminal else ""
        while True:
            try:
                line = input(mark)
            except EOFError:
                if self._on_terminal:
                    print()
                return
            except KeyboardInterrupt:
                if not self._on_terminal:
                    raise
                print("\nCtrl-D leaves")
                continue
            if line.strip():
                yield line

    def _reply(self, line: str) -> None:
        self._answer(line[1:] if line.startswith("//") else line)

    def _obey(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name not in self._commands:
            raise ForgeError(f"there is no command /{name}{did_you_mean(name, self._commands) or '; see /help'}")
        self._commands[name][1](rest.strip())

    def _help(self) -> None:
        width = max(map(len, self._commands)) + 2
        for name, (meaning, _) in self._commands.items():
            print(f"/{name:<{width}}{meaning}")
        print("A line that begins with // is a message that begins with /. Ctrl-C ends an answer.")

    def _setter(self, name: str) -> Callable[[str], None]:
        key, type_ = name.replace("-", "_"), SETTINGS[name][0]

        def set_value(text: str) -> None:
            if text:
                try:
                    setattr(self._options, key, type_(text))
                except (ValueError, argparse.ArgumentTypeError) as error:
                    raise ForgeError(f"/{name} {text}: {error}") from error
            print(f"{name} {getattr(self._options, key)}")

        return set_value

    def _leave(self, _: str) -> None:
        raise EOFError


def _setting_help(name: str) -> str:
    # Without the default at its end, as the value may have been changed
    return f"show it, or set it: {SETTINGS[name][2].rpartition(' (')[0]}"


@contextmanager
def _history(on_terminal: bool) -> Iterator[None]:
    """Allow lines to be edited and recalled, including lines from earlier conversations."""
    if not on_terminal:
        yield
        return
    try:
        # The import alone gives `input` editing and a history
        import readline
    except ImportError:  # a Python without it: lines are typed plainly
        yield
        return
    # Where the XDG base directories have the state of programs
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "forge-run" / "chat_history"
    readline.set_history_length(HISTORY)
    with suppress(OSError):
        # The file is absent before the first conversation
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):  # a home that cannot be written keeps no history
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
