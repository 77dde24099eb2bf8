"""Questions on a terminal."""

from __future__ import annotations

import argparse
import os

from rich.console import Console
from rich.prompt import Prompt

from forge_plugin_plan.init.command import DEFAULT_TIME, seconds_of

CHOICES = {
    "text": "my own text files",
    "dataset": "a Hugging Face dataset",
    "tokens": "tokens that forge-run data prepare wrote",
    "stdlib": "Python's standard library, to try things out",
}


def ask(options: argparse.Namespace) -> None:
    """Ask what to train on and for how long, and keep the answers in `options`."""
    console = Console(highlight=False)
    console.print("What do you want to train on?")
    for number, text in enumerate(CHOICES.values(), 1):
        console.print(f"  {number}  {text}", markup=False)
    numbers = [str(number) for number in range(1, len(CHOICES) + 1)]
    kind = list(CHOICES)[int(Prompt.ask("choose", choices=numbers, default="1", console=console)) - 1]
    if kind == "stdlib":
        options.stdlib = True
    elif kind == "dataset":
        options.dataset = Prompt.ask("its name on the hub, or a folder", console=console)
    else:
        answer = _existing(console, "folder or file" if kind == "text" else "folder")
        # --text can be repeated, so that its value is a list
        setattr(options, kind, [answer] if kind == "text" else answer)
    options.time = _time(console)


def _existing(console: Console, what: str) -> str:
    while True:
        path = Prompt.ask(what, console=console)
        if os.path.exists(os.path.expanduser(path)):
            return path
        # Without markup: a path may have brackets
        console.print(f"{path} does not exist (looked from {os.getcwd()})", markup=False)


def _time(console: Console) -> float:
    while True:
        answer = Prompt.ask("How long may it train? (90s, 30m, 8h, 2d)", default=DEFAULT_TIME, console=console)
        try:
            return seconds_of(answer)
        except argparse.ArgumentTypeError as error:
            console.print(str(error), markup=False)
