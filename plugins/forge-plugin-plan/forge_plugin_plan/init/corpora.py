"""What to train on: the tables of the job for it, and how much it is."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from forge_core.contracts.errors import JobError, listed
from forge_plugin_text import CorpusDataset, PythonStdlib, Text

READ = 64 * 2**20
"""Bytes of text that are read of a corpus; the rest is estimated from them."""
PROMPT = 60
"""Characters of a prompt."""
BPE_BYTES = 100_000_000
"""Bytes on which a tokenizer is trained at most."""
HELD_OUT = 0.05
"""Share of the text to hold out, about; a hundredth is enough where the corpus is large."""
LARGE = 100_000_000
MOST_HELD_OUT = 0.3

Key = tuple[str, Any, str]
"""A key of the job, its value, and what it does."""


@frozen(kw_only=True)
class Corpus:
    """Data for a job."""

    source: Sequence[Key]
    """Keys of `[[data.sources]]`."""
    tokenizer: Sequence[Key] = ()
    """Keys of `[data.tokenizer]`; empty: a byte-level BPE is trained on the data."""
    text_bytes: int | None = None
    """Bytes of text; None: not known before it is read."""
    tokens: int | None = None
    """Tokens, where they are counted already."""
    vocab_size: int | None = None
    """Of a tokenizer that exists."""
    chats: bool = False
    remarks: Sequence[str] = ()
    """What a user should know of the data, a sentence each."""
    prompt: str = ""
    """The beginning of a text, from which the model is to continue."""
    name: str = field(default="run")
    """Name for the run."""


def own_text(paths: Sequence[str], text_field: str) -> Corpus:
    """Look at text files.

    Raises:
        JobError: there are none, or they cannot be read.
    """
    path: Any = paths[0] if len(paths) == 1 else list(paths)
    dataset = Text(path=path if isinstance(path, str) else tuple(path), field=text_field)
    remarks, errors = list[str](), "strict"
    try:
        looked = look(dataset)
    except JobError as error:
        # Recognised by its message, as all other problems of the files are JobErrors too
        if "is not UTF-8" not in str(error):
            raise
        errors = "replace"
        looked = look(evolve(dataset, errors="replace"))
        remarks.append(f"not all of it is UTF-8; invalid bytes are read as U+FFFD ({error.problems[0].message})")
    count = len(dataset.files())
    # The amount of text first, as it decides most of the sizes
    remarks.insert(0, f"{count:,} file{'s' if count > 1 else ''}, {looked.describe()}")
    if left_out := dataset.left_out():
        remarks.append("left out: " + ", ".join(f"{count:,} {what}" for what, count in left_out.items()))
    source: list[Key] = [
        ("type", "text", "files of text: .txt, .md and .py are one document each, .jsonl one a line; .gz and .zst too"),
        ("path", path, "a file, a folder (searched to any depth) or a glob, or a list of them"),
    ]
    # A key with its default value is not written, so that the job stays short
    if text_field != "text":
        source.append(("field", text_field, "the key of a JSON line that holds its text"))
    if errors != "strict":
        source.append(("errors", errors, "bytes that are not UTF-8 become U+FFFD; strict would stop at the first"))
    every, why = _held_out_every(looked)
    source.append(("held_out_every", every, why))
    name = _run_name(Path(paths[0]).expanduser().resolve().stem)
    return Corpus(source=source, text_bytes=looked.bytes, remarks=remarks, prompt=looked.prompt, name=name)


def stdlib() -> Corpus:
    """The Python standard library of this machine: text that is always there."""
    looked = look(PythonStdlib())
    source: list[Key] = [
        ("type", "python_stdlib", "the standard library of this Python: real text, without a download"),
        ("held_out_every", 20, "every 20th document is held out: it measures the model and is never trained on"),
    ]
    remarks = [f"the Python standard library, {looked.describe()}"]
    return Corpus(source=source, text_bytes=looked.bytes, remarks=remarks, prompt="def read_lines(path", name="stdlib")


def prepared_tokens(folder: str) -> Corpus:
    """Token files of `forge-run data prepare`.

    Raises:
        JobError: the folder is not one of a finished `data prepare`.
    """
    try:
        manifest = json.loads(Path(folder, "manifest.json").read_bytes())
        train, vocab_size = manifest["splits"]["train"], manifest["tokenizer"]["vocab_size"]
        tokens, documents = int(train["tokens"]), int(train["documents"])
        held_out = bool(manifest["splits"]["held_out"]["tokens"])
    # Another program may have written a manifest.json with any content
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"--tokens {folder}: no manifest.json that data prepare wrote ({type(error).__name__}: {error})"
        hint = "make it with `forge-run data prepare`; other token files are a job's `memmap` source"
        raise JobError(f"{message}; {hint}") from error
    source: list[Key] = [
        ("type", "memmap", "files of token ids, mapped into memory"),
        ("path", folder, "the folder that `forge-run data prepare` wrote, with what it held out"),
    ]
    # Documents held out by `data prepare` are used for validation without a key
    if not held_out:
        source.append(("held_out_every", 100, "every 100th document is held out: it is never trained on"))
    tokenizer: list[Key] = [
        ("type", "prepared", "the tokenizer that the data was prepared with"),
        ("path", folder, "the same folder"),
    ]
    remarks = [f"{tokens:,} tokens in {documents:,} documents, of a vocabulary of {vocab_size:,}"]
    name = _run_name(Path(folder).expanduser().resolve().name)
    return Corpus(source=source, tokenizer=tokenizer, tokens=tokens, vocab_size=vocab_size, remarks=remarks, name=name)


def hugging_face(path: str, text_field: str, messages: str, config: str, split: str, tokenizer: str) -> Corpus:
    """A Hugging Face dataset, which is not opened: that may take a download.

    Raises:
        JobError: chats are asked for without a tokenizer that has a template.
    """
    source: list[Key] = [("type", "huggingface", "a dataset of the Hugging Face hub, or in their formats on disk")]
    # As in `datasets.load_dataset`: of a single file, `path` is the format
    if Path(path).expanduser().is_file():
        source.append(("path", _format_of(path), "the format of the file"))
        source.append(("data_files", path, "the file, or a list of files or globs"))
    else:
        source.append(("path", path, "its name on the hub, or a folder of .jsonl or .parquet files"))
    if config:
        source.append(("config", config, "its configuration"))
    source.append(("split", split, "the split to train on"))
    if messages:
        source.append(("messages", messages, "the field with the chat; only the assistant's turns are learned"))
    else:
        source.append(("field", text_field, "the field of a row that holds its text"))
    source.append(("held_out_every", 100, "every 100th row is held out: it measures the model and is never trained on"))
    remarks = [f"the dataset {path}; how large it is shows when it is read"]
    keys: list[Key] = []
    if tokenizer:
        keys = [
            ("type", "auto", "a tokenizer of Hugging Face's transformers"),
            ("path", tokenizer, "its folder, or its name on the hub"),
        ]
    return Corpus(
        source=source,
        tokenizer=keys,
        chats=bool(messages),
        remarks=remarks,
        name=_run_name(path.rstrip("/").rpartition("/")[2].partition(".")[0]),
    )


FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow", ".txt": "text"}


def _format_of(path: str) -> str:
    suffixes = [suffix for suffix in Path(path).suffixes if suffix in FORMATS]  # `.jsonl.gz` too
    if not suffixes:
        raise JobError(f"--dataset {path}: its format is not known; there are {', '.join(FORMATS)}")
    return FORMATS[suffixes[-1]]


# --- looking at text ---------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Looked:
    """A corpus as far as it was read."""

    bytes: int
    """Bytes of text; estimated where `partial`."""
    documents: int
    sizes: Sequence[int]
    """Bytes of the documents that were read, in order."""
    partial: bool
    prompt: str

    def describe(self) -> str:
        """`10.6 MB of text in 600 documents`."""
        about = "about " if self.partial else ""
        return f"{about}{self.bytes / 1e6:,.1f} MB of text in {about}{self.documents:,} documents"


def look(dataset: CorpusDataset) -> Looked:
    """Read the beginning of a corpus, and estimate the rest by the sizes of its files."""
    on_disk = {file.name: os.stat(file.path).st_size for file in dataset.files()}
    sizes, done, of_file, last, prompt = list[int](), 0, 0, "", ""
    partial, total = False, 0
    for document, _ in dataset.corpus().documents():
        # Documents come file by file, so that all files before this one were read completely
        if document.file != last:
            done, of_file, last = done + on_disk.get(last, 0), 0, document.file
        size = len(document.text.encode())
        sizes.append(size)
        of_file += size
        prompt = prompt or _beginning(document.text)
        total += size
        if partial := total >= READ:
            break
    if not total:
        raise JobError(f"--text: no text in {listed([*on_disk])}; name files with text")
    # Compressed text is larger than its file: of the last file, at most the whole counts as read.
    factor = max(1.0, sum(on_disk.values()) / (done + min(of_file, on_disk[last]))) if partial else 1.0
    return Looked(
        bytes=round(total * factor),
        documents=round(len(sizes) * factor),
        sizes=sizes,
        partial=partial,
        prompt=prompt,
    )


def _beginning(text: str) -> str:
    """The first words of the first line of some length: up to five, in up to 60 characters."""
    line = next((line.strip() for line in text.splitlines() if len(line.strip()) > 20), "")
    words = line.split()[:5]
    while len(words) > 1 and len(" ".join(words)) > PROMPT:
        words.pop()
    return " ".join(words)[:PROMPT]  # of a language without spaces, or of one very long word


def _held_out_every(looked: Looked) -> tuple[int, str]:
    """Returns n of the n-th documents to hold out, and why."""
    if len(looked.sizes) < 2:
        return 0, "nothing is held out, as a single document cannot be split; divide it into files to measure the model"
    wanted = HELD_OUT if looked.bytes < LARGE else HELD_OUT / 5
    candidates = [every for every in (100, 50, 20, 10, 5, 4, 3, 2) if every <= max(2, len(looked.sizes))]
    # By bytes and not by documents, which may differ widely in size
    shares = {every: sum(looked.sizes[::every]) / sum(looked.sizes) for every in candidates}
    # Nearest by ratio: half of the wanted share is as far from it as twice the share
    best = min(candidates, key=lambda every: abs(math.log(max(shares[every], 1e-9) / wanted)))
    # Every n includes the first document, so that no other n would help
    if shares[best] > MOST_HELD_OUT:
        share = f"{shares[best]:.0%} of the text"
        return 0, f"nothing is held out: documents are so unequal that the first alone would be {share}; divide them"
    ordinal = {2: "2nd", 3: "3rd"}.get(best, f"{best}th")
    return best, f"every {ordinal} document ({shares[best]:.1%} of the text) is held out: it is never trained on"


def _run_name(text: str) -> str:
    """A name that `job.name` may be."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text).strip("-._")
    return kept or "run"
