"""Which values are secrets: they must not be in a cluster file, in a text that is sent, or in a log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

WORDS = {"TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "APIKEY", "KEY"}
"""Words of a variable's name, between underscores, by which its value is a secret. TOKENIZERS_PARALLELISM has none."""
PLACES = {"PATH", "FILE", "DIR", "HOME"}
"""Last words of a variable's name by which its value is only the place of a secret."""
_TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[opsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|xox[abp]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,})"
)
"""Tokens by the prefixes of their issuers: Hugging Face, OpenAI, GitHub, GitLab, AWS, Google, Slack, and JWT."""
_IN_URL = re.compile(r"://[^/\s:@]+:[^/\s:@]+@")
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[A-Za-z0-9+/=_-]{32,}")
"""What else a key is: at least 32 letters and digits and nothing else, such as keys of Weights & Biases."""


def known_token(text: str) -> str:
    """Returns the first characters of a token in a text, by its prefix or its place in a URL; empty if it has none."""
    if found := _TOKEN.search(text):
        return f"{found[0][:6]}…"
    return "a password in a URL" if _IN_URL.search(text) else ""


def is_secret(name: str, value: str) -> bool:
    """Whether a variable has a secret, by its name or by its value."""
    words = name.upper().split("_")
    by_name = bool(WORDS & {*words}) and words[-1] not in PLACES
    return bool(value) and (by_name or bool(known_token(value)) or bool(_RANDOM.fullmatch(value)))


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields every text in a document of tables and arrays, with its path (`resources.labels.team`)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from texts(item, f"{path}[{number}]")
    elif isinstance(value, str):
        yield path, value
