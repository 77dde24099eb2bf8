from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.cli import main
from forge_core.contracts.errors import Problem
from forge_plugin_memmap import Memmap

LETTERS = '''
from __future__ import annotations

import hashlib
import time

from attrs import frozen

from forge_core.contracts.components import TokenizerComponent


@frozen(kw_only=True)
class Letters(TokenizerComponent):
    """a to z are 1 to 26, anything else is 27; 0 ends a document."""

    seconds: float = 0.0
    """Each batch takes so long."""

    def build(self, context, documents):
        return LetterTokenizer(self.seconds)

    def load(self, context, folder):
        return LetterTokenizer(self.seconds)


class LetterTokenizer:
    vocab_size, end_of_text = 28, 0

    def __init__(self, seconds):
        self.seconds = seconds

    def encode(self, text):
        return [ord(letter) - 96 if "a" <= letter <= "z" else 27 for letter in text]

    def encode_batch(self, texts):
        time.sleep(self.seconds)
        return [self.encode(text) for text in texts]

    def decode(self, ids):
        return "".join(chr(96 + id_) if id_ < 27 else "?" for id_ in ids if id_)

    def save(self, folder):
        pass

    def fingerprint(self):
        return hashlib.sha256(b"letters").hexdigest()
'''


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for every test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FORGE_CACHE", str(folder))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, but for a tokenizer of 28 ids: `./letters.py:Letters`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.py").write_text(f"{LETTERS}# {tmp_path}\n")  # a module is known by its content
    return tmp_path


@pytest.fixture
def forge_run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process: exit code, standard output, standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main(list(argv))
        except SystemExit as end:
            code = int(end.code or 0)
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def prepare(forge_run: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Prepare data with `Letters`, in this process by default; returns what is printed."""

    def run(*argv: str) -> str:
        workers = () if any(argument.startswith("--workers") for argument in argv) else ("--workers=1",)
        tokenizer = () if any(argument.startswith("--tokenizer=") for argument in argv) else LETTERS_ARGUMENT
        code, out, err = forge_run("data", "prepare", *argv, *workers, *tokenizer)
        assert code == 0, err
        return out

    return run


LETTERS_ARGUMENT = ("--tokenizer=./letters.py:Letters",)


@pytest.fixture
def make_context() -> Callable[..., Any]:
    """Surroundings of a dataset that is built: (tokenizer, the model's vocabulary) -> context."""

    def make(tokenizer: Any = None, vocab_size: int = 0) -> SimpleNamespace:
        job = SimpleNamespace(model=SimpleNamespace(vocab_size=vocab_size))
        return SimpleNamespace(job=job, tokenizer=tokenizer, mesh=None)

    return make


@pytest.fixture
def problems(make_context: Callable[..., Any]) -> Callable[..., list[Problem]]:
    """Keys of a dataset -> its problems."""

    def find(vocab_size: int = 0, **keys: Any) -> list[Problem]:
        job = make_context(vocab_size=vocab_size).job
        return list(Memmap(**keys).problems(job, None))

    return find


@pytest.fixture
def open_documents(make_context: Callable[..., Any]) -> Callable[..., Any]:
    """Keys of a dataset -> its documents."""
    return lambda tokenizer=None, vocab_size=0, **keys: Memmap(**keys).build(make_context(tokenizer, vocab_size))


@pytest.fixture
def python_modules() -> Callable[[str], set[str]]:
    """The modules that importing one leads to, in a process of its own."""

    def imported(name: str) -> set[str]:
        code = f"import sys, {name}; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    return imported
