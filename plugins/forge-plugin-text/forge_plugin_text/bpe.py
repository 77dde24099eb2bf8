"""Tokenizer `bpe`: byte-level byte-pair encoding, trained on the corpus."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge, gt, le, min_len

from forge_core import report_progress
from forge_core.contracts.components import TokenizerComponent
from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.cache import cached_folder, digest_of
from forge_plugin_text.file import TokenizerFile

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_text.tokenizer_json import JsonTokenizer

FORMAT = 1
"""Part of the key in the cache: increase it when the same settings train another tokenizer."""
ALPHABET = 256
"""Number of bytes; each is a token, so that any text can be encoded."""


@frozen(kw_only=True)
class BPE(TokenizerComponent):
    """Byte-level BPE (Sennrich et al. 2016; bytes and word pattern of GPT-2), trained on the training documents.

    The same documents and settings yield the same tokenizer, which is cached.
    """

    # The library reserves memory for all, and ends the process where that fails
    vocab_size: int = field(default=4096, validator=[gt(ALPHABET), le(1 << 20)])
    """Upper bound of the tokens, including special ones and the 256 bytes; a small corpus yields fewer."""
    min_frequency: int = field(default=2, validator=ge(1))
    """Smallest number of occurrences of a pair for which it is merged."""
    end_of_text: str = field(default="<|endoftext|>", validator=min_len(1))
    """The special token that ends a document. The same characters in a text are encoded as text."""
    special_tokens: tuple[str, ...] = ()
    """Additional tokens with separate ids, which no text is encoded to, for later use such as the turns of a chat."""
    max_bytes: int = field(default=0, validator=ge(0))
    """Bytes of the first documents to train on; 0: all."""

    def build(self, context: BuildContext, documents: Callable[[], Iterable[str]]) -> JsonTokenizer:
        """Returns the tokenizer, from the cache if it was trained on these documents with these settings.

        Raises:
            JobError: there are no documents, or they change while they are read.
        """
        sample = Sample(documents(), self.max_bytes)
        # Reads all documents, and with them computes the digest below
        if not sum(map(len, sample)):
            raise JobError("bpe is trained on the corpus, but no source has any text")
        expected = sample.digest()

        def train(folder: Path) -> dict[str, int]:
            # Read twice: the key needs a digest of the texts, which are too large to keep in memory.
            again = Sample(documents(), self.max_bytes, "reading text for the tokenizer again")
            vocab_size = self._train(again, folder)
            if again.digest() != expected:
                raise JobError("the corpus changed while bpe was trained on it; start again when nothing writes to it")
            return {"vocab_size": vocab_size}

        # By SHA-256 each time: a damaged vocabulary would only show in the ids.
        stored = cached_folder("tokenizers", self._key(expected), train, "full")
        return self.load(context, stored.path)

    def load(self, context: BuildContext, folder: Path) -> JsonTokenizer:
        """Loads the `tokenizer.json` that training wrote, whose vocabulary may be smaller than `vocab_size`."""
        return TokenizerFile(path="", end_of_text=self.end_of_text).load(context, folder)

    def expected_vocab_size(self) -> int:
        """Returns the job's `vocab_size`; a small corpus yields fewer tokens."""
        return self.vocab_size

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the special tokens differ, and that they and all bytes have room in `vocab_size`."""
        special = self._special()
        if len(set(special)) < len(special) or not all(special):
            yield Problem("special_tokens", f"{special} must differ from each other, and none may be empty")
        if self.vocab_size < ALPHABET + len(special):
            least = f"{ALPHABET} bytes and {len(special)} special tokens"
            yield Problem(
                "vocab_size", f"{self.vocab_size} has no room for {least}; at least {ALPHABET + len(special)}"
            )

    def _special(self) -> list[str]:
        return [self.end_of_text, *self.special_tokens]

    def _key(self, documents: str) -> str:
        import tokenizers

        return digest_of(
            FORMAT, tokenizers.__version__, self.vocab_size, self.min_frequency, self._special(), documents
        )

    def _train(self, texts: Iterable[str], folder: Path) -> int:
        """Write the trained tokenizer; returns the size of its vocabulary."""
        from forge_plugin_text.tokenizer_json import FILE_NAME
        from forge_plugin_text.training import train_bpe

        tokenizer = train_bpe(iter(texts), self.vocab_size, self.min_frequency, self._special())
        tokenizer.save(str(folder / FILE_NAME), pretty=False)
        return tokenizer.get_vocab_size()


class Sample:
    """The documents that BPE is trained on: the first, until they have `max_bytes` (0: all). To be iterated once."""

    def __init__(self, documents: Iterable[str], max_bytes: int, work: str = "reading text for the tokenizer") -> None:
        self._documents, self._max_bytes, self._work = documents, max_bytes, work
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[str]:
        taken = 0
        for text in self._documents:
            data = text.encode()
            # With lengths: documents that are divided otherwise are a different corpus
            self._digest.update(len(data).to_bytes(8, "little"))
            self._digest.update(data)
            yield text
            taken += len(data)
            report_progress(f"{self._work}, {taken / 1e6:,.1f} MB", taken, self._max_bytes)  # other ranks wait
            if self._max_bytes and taken >= self._max_bytes:
                break
        report_progress(f"training the tokenizer on {taken / 1e6:,.1f} MB")  # in Rust, without reports meanwhile

    def digest(self) -> str:
        """SHA-256 (hex) of the documents taken so far."""
        return self._digest.hexdigest()
