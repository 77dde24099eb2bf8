"""A tokenizer in Hugging Face's format `tokenizer.json`, in which special tokens in a text stay text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from forge_core.contracts.errors import JobError, Problem

FILE_NAME = "tokenizer.json"


class JsonTokenizer:
    """Encodes with a `tokenizer.json`, without adding or truncating.

    Truncation, padding and tokens around a text (the file's post-processor) have no effect, and special tokens spelt
    out in a text are encoded as their characters. `decode` leaves special tokens out.
    """

    def __init__(self, content: str, end_of_text: str, begin_of_text: Sequence[str] = ()) -> None:
        """Parse the file's `content`; `end_of_text` and `begin_of_text` are added tokens of it.

        Raises:
            JobError: the file cannot be used, or a document would begin with its end.
        """
        self._content, self._end_of_text, self._begin_of_text = content, end_of_text, tuple(begin_of_text)
        if end_of_text in self._begin_of_text:
            message = f"{end_of_text!r} ends documents, and a document that began with it would be empty"
            hint = "leave begin_of_text out: the end of each document stands before the next one"
            raise JobError([Problem("begin_of_text", f"{message}; {hint}")])
        self._tokenizer = _from_json(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        around = [end_of_text, *self._begin_of_text]
        self._tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in around])
        # After the tokens are added: spelt out in a text, special tokens are encoded as plain characters
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Not the number of tokens: ids may have gaps, and the model needs a row for the highest
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_text = vocabulary[end_of_text]
        self.begin_of_text = [vocabulary[token] for token in self._begin_of_text]
        self._check_unspellable("end_of_text", end_of_text, "that a document could end itself")
        for token in self._begin_of_text:
            self._check_unspellable("begin_of_text", token, "that a document could begin within another")

    @staticmethod
    def own_beginning(content: str) -> tuple[str, ...]:
        """Returns the tokens that the file's post-processor puts before a text; raises `JobError` as the class."""
        tokenizer = _from_json(content)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        whole, plain = (tokenizer.encode("a", add_special_tokens=added) for added in (True, False))
        # Where the plain encoding begins within the one with the post-processor's tokens
        before = next(n for n in range(len(whole.ids)) if whole.ids[n : n + len(plain.ids)] == plain.ids)
        return tuple(whole.tokens[:before])

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without tokens around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes as `encode`, in several threads, and without the offsets of tokens, which takes less time."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token by its name, such as `<|im_end|>`; None if there is none."""
        return self._tokenizer.token_to_id(token)

    def save(self, folder: Path) -> None:
        """Writes the content as it was read, byte for byte."""
        (folder / FILE_NAME).write_bytes(self._content.encode())

    def fingerprint(self) -> str:
        """Covers the content, and the tokens that end and begin documents."""
        # Nothing where there is none, so that older fingerprints stay valid
        begin = "".join(f"{token}\0" for token in self._begin_of_text)
        return hashlib.sha256(f"{begin}{self._end_of_text}\0{self._content}".encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild in another process: a pickled `tokenizers.Tokenizer` loses `encode_special_tokens`."""
        return JsonTokenizer, (self._content, self._end_of_text, self._begin_of_text)

    def _check_unspellable(self, key: str, text: str, consequence: str) -> None:
        """Raise if text can spell a token: some models (Unigram) have special tokens as ordinary pieces."""
        id_ = self._tokenizer.token_to_id(text)
        # Alone, within a word and between spaces, which pre-tokenizers treat differently
        if any(id_ in ids for ids in self.encode_batch([text, f"a{text}b", f" {text} "])):
            raise JobError(
                f"this tokenizer encodes the characters {text!r} in a text as its {key.replace('_', '-')}, id {id_}, "
                f"so {consequence}; set {key} to a token that text cannot spell"
            )


def _from_json(content: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # the library raises no narrower class
        raise JobError(f"{FILE_NAME} cannot be used by tokenizers: {error}") from error
