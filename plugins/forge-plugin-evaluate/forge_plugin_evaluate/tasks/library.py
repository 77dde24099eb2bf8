"""Tasks made from Python's standard library, which every machine has: they test the knowledge of a code model.

Items depend on the version of Python, which a run's provenance names: functions come and go, and texts change.
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from attrs import frozen

from forge_plugin_evaluate.tasks.kinds import Item
from forge_plugin_evaluate.tasks.synthetic import CHOICES, MadeTask, choose

# One text, which takes a fifth of the lines of a list.
NAMES = (
    "ast base64 binascii bisect calendar codecs colorsys contextlib copy difflib dis fnmatch functools gc gettext "
    "glob gzip hashlib heapq html importlib inspect io itertools json keyword linecache locale logging math "
    "mimetypes operator os pickle platform pprint random re secrets shlex shutil signal socket statistics string "
    "struct subprocess sys tempfile textwrap threading time timeit tokenize traceback types unicodedata "
    "urllib.parse urllib.request uuid warnings weakref zlib"
)
MODULES = tuple(NAMES.split())
"""Modules whose import starts nothing, and that are there on every system."""


@frozen
class Function:
    """A public function of the standard library."""

    module: str
    name: str
    signature: str
    """As in `def`; empty if Python provides no signature, or if a default is shown as an object."""
    summary: str
    """The first line of its documentation."""


@frozen(kw_only=True)
class Modules(MadeTask):
    """Name the module of the standard library that a function belongs to, among four."""

    def _item(self, draw: random.Random, number: int) -> Item:
        where = Counter(function.name for function in _functions())
        # A name that several modules have would have several right answers
        function = draw.choice([function for function in _functions() if where[function.name] == 1])
        # Modules that only import the function have it too, and would be right answers
        has_name = {module for module in MODULES if hasattr(importlib.import_module(module), function.name)}
        others = draw.sample([module for module in MODULES if module not in has_name], CHOICES - 1)
        context = f"The function {function.name} of Python's standard library is in the module"
        return choose(draw, context, f" {function.module}", [f" {module}" for module in others])


@frozen(kw_only=True)
class Signatures(MadeTask):
    """Find the function that a line of documentation describes, among four of one module, by their signatures."""

    def _item(self, draw: random.Random, number: int) -> Item:
        known = [function for function in _functions() if function.signature and function.summary]
        enough = {module for module, count in Counter(f.module for f in known).items() if count >= CHOICES}
        function = draw.choice([function for function in known if function.module in enough])
        # One with the same summary would be right, too
        beside = [f for f in known if f.module == function.module and f.summary != function.summary]
        others = draw.sample(beside, CHOICES - 1) if len(beside) >= CHOICES - 1 else beside
        context = f"# {function.summary}\ndef"
        return choose(
            draw, context, f" {function.name}{function.signature}:", [f" {f.name}{f.signature}:" for f in others]
        )


@cache
def _functions() -> tuple[Function, ...]:
    """Public functions of `MODULES`, in order of module and name; each once, in the first module that has it."""
    return tuple(function for module in MODULES for function in _functions_of(module))


def _functions_of(name: str) -> Iterator[Function]:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    for key, value in sorted(vars(module).items()):
        # Without a list of public names, what the module has imported from elsewhere is not its own.
        own = key in listed if listed is not None else getattr(value, "__module__", "") in (name, f"_{name}")
        if own and not key.startswith("_") and inspect.isroutine(value):
            lines = (inspect.getdoc(value) or "").splitlines()
            yield Function(name, key, _signature(value), lines[0].strip() if lines else "")


def _signature(function: Any) -> str:
    """Returns the signature as text; empty where there is none, or where it shows an address in memory."""
    try:
        text = str(inspect.signature(function))
    except (TypeError, ValueError):
        return ""
    return "" if " at 0x" in text or "<" in text else text
