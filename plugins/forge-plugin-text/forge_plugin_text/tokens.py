"""The cached token files of a corpus: `train` and `held_out` (see `forge_kit.data.token_file`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forge_core import report_progress
from forge_core.contracts.errors import JobError
from forge_kit.data.cache import CachedFolder, Progress, Verify, cached_folder, digest_of
from forge_kit.data.origins import Origin
from forge_kit.data.token_file import Header, TokenFile, TokenFileWriter
from forge_kit.data.tokenizers import begin_of_text
from forge_plugin_text.corpus import CorpusFacts, TextCorpus
from forge_plugin_text.reading import Document

if TYPE_CHECKING:
    import numpy as np

    from forge_core.contracts.data import Tokenizer

logger = logging.getLogger(__name__)

FORMAT = 2
"""Part of the key: increase it when the same inputs result in other files."""
TRAIN, HELD_OUT = "train", "held_out"
PART_CHARACTERS = 1 << 22
"""Characters above which a document is encoded in parts, cut before a line break, to bound memory."""
BATCH_CHARACTERS = 1 << 22
BATCH_PARTS = 1024


class TextPart(NamedTuple):
    """Unit of encoding: a document, or a part of a very long one."""

    text: str
    held_out: bool
    is_last: bool
    document: str
    is_first: bool = True


def cached_tokens(
    facts: CorpusFacts, find_corpus: Callable[[], TextCorpus], tokenizer: Tokenizer, verify: Verify
) -> CachedFolder:
    """Returns the token files of a corpus, encoding it if the cache does not have them.

    Args:
        facts: the known facts about the corpus.
        find_corpus: returns the corpus itself, which is needed to encode it only.
        tokenizer: encodes it.
        verify: see `cached_folder`.

    Raises:
        JobError: the corpus cannot be read, or changes while it is.
    """
    around = tokenizer.end_of_text, *begin_of_text(tokenizer)
    key = digest_of(FORMAT, facts.fingerprint, tokenizer.fingerprint(), tokenizer.vocab_size, *around)

    def make(folder: Path) -> dict[str, Any]:
        corpus = find_corpus()
        logger.info("tokenising %s", corpus)
        info = write_tokens(folder, corpus, tokenizer, corpus.text_bytes())
        # After the last read: a change during it would be stored under the old key
        if corpus.fingerprint() != facts.fingerprint:
            message = f"{corpus} changed while it was tokenised, or is not what rank 0 has"
            raise JobError(f"{message}; start again when nothing writes to it")
        return info

    return cached_folder("tokens", key, make, verify, resumable=True, sums=True)


class CorpusFile(TokenFile):
    """The documents of one split, which are found again in the files that they were read from."""

    def __init__(self, stored: CachedFolder, split: str, find_corpus: Callable[[], TextCorpus], held_out: Any) -> None:
        super().__init__(stored.path / split, held_out, stored.identity(split))
        self._find_corpus, self._is_held_out = find_corpus, split == HELD_OUT

    def origins(self, numbers: np.ndarray) -> list[Origin | None]:
        """See `forge_kit.data.origins.HasOrigins`. Reads the texts up to the last document that is asked for."""
        corpus = self._find_corpus()
        paths = {file.name: file.path for file in corpus.files}
        own = (
            document
            for document, is_held_out in corpus.documents()
            if is_held_out == self._is_held_out and document.text
        )
        wanted = set(numbers.tolist())
        found: list[Origin | None] = []
        # Counted, as the cache has ids alone: names of a million documents would cost each run more than a look here
        for number, document in enumerate(islice(own, max(wanted, default=-1) + 1)):
            if number in wanted:
                line = document.name.removeprefix(document.file).lstrip(":")
                found.append(Origin(paths[document.file], int(line) if line else None))
        return found


def open_documents(stored: CachedFolder, facts: CorpusFacts, find_corpus: Callable[[], TextCorpus]) -> TokenFile:
    """Open the documents of both splits; arguments as of `cached_tokens`.

    Raises:
        JobError: nothing is held out although the job requires it.
    """
    held_out = None
    if facts.holds_out_any:
        if not stored.info[HELD_OUT]["tokens"]:
            raise JobError(f"{facts.name}: none of the documents to hold out is there or has text; choose others")
        held_out = CorpusFile(stored, HELD_OUT, find_corpus, None)
    return CorpusFile(stored, TRAIN, find_corpus, held_out)


def write_tokens(folder: Path, corpus: TextCorpus, tokenizer: Tokenizer, size: int = 0) -> dict[str, Any]:
    """Encode a corpus of about `size` bytes (0: not known) into `folder`, continuing after an interrupted process.

    Returns:
        The counts of both splits.
    """
    vocabulary, begin = (tokenizer.vocab_size, tokenizer.end_of_text), begin_of_text(tokenizer)
    progress = Progress(folder)
    done: int = progress.state.get("parts", 0)
    encoded = 0
    with (
        TokenFileWriter(folder / TRAIN, *vocabulary, resume=progress.state.get(TRAIN)) as train,
        TokenFileWriter(folder / HELD_OUT, *vocabulary, resume=progress.state.get(HELD_OUT)) as held_out,
    ):
        # Parts that are on the disk are read again and passed over: their number is all that the state has.
        for batch in batches(islice(text_parts(corpus.documents()), done, None)):
            for part, ids in zip(batch, tokenizer.encode_batch([part.text for part in batch]), strict=True):
                writer = held_out if part.held_out else train
                # Parts of one document have one beginning
                whole = [*begin, *ids] if part.is_first else ids
                text_bytes = len(part.text.encode())
                writer.add(part.document, whole, text_bytes=text_bytes, is_last=part.is_last)
                encoded += text_bytes
            done += len(batch)
            report_progress("encoding text", encoded, size)  # other ranks wait for this one
            if progress.is_due:
                # `sync` first: the state must not count parts that the disk does not have
                progress.save({"parts": done, TRAIN: train.sync(), HELD_OUT: held_out.sync()})
    progress.finish()
    return {TRAIN: _counts(train.header()), HELD_OUT: _counts(held_out.header())}


def _counts(header: Header) -> dict[str, int]:
    return {"documents": header.documents, "tokens": header.tokens, "bytes": header.text_bytes}


def text_parts(documents: Iterable[tuple[Document, bool]]) -> Iterator[TextPart]:
    """Yields the documents that are not empty, very long ones in parts."""
    for document, held_out in documents:
        start, length = 0, len(document.text)
        while start < length:
            end = _part_end(document.text, start)
            yield TextPart(document.text[start:end], held_out, end == length, document.name, start == 0)
            start = end


def _part_end(text: str, start: int) -> int:
    """Returns the end of the part that starts at `start`: before the last line break in reach, else at full size.

    The tokens are the same as for the whole document, except for the few next to a cut that a tokenizer may join
    across it.
    """
    limit = start + PART_CHARACTERS
    if limit >= len(text):
        return len(text)
    # After the start: a part that begins with a break would be empty
    line_break = text.rfind("\n", start + 1, limit)
    return line_break if line_break > 0 else limit


def batches(parts: Iterable[TextPart]) -> Iterator[list[TextPart]]:
    """Yields groups of parts, in order, bounded in number and in characters (a single part may exceed the bound)."""
    batch: list[TextPart] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part.text)
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_PARTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
