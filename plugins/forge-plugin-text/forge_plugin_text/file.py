"""Tokenizer `file`: an existing `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import field, frozen

from forge_core.contracts.components import FilePath, TokenizerComponent, when_resumed
from forge_core.contracts.errors import JobError, Problem

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_text.tokenizer_json import JsonTokenizer

OWN = "auto"
"""As `begin_of_text`: the tokens that the file puts before a text."""
USUAL_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>")
"""Tokens that end a document in well-known families (GPT and Qwen, Llama 3, DeepSeek, Gemma, Llama 2 and Mistral)."""


@frozen(kw_only=True)
class TokenizerFile(TokenizerComponent):
    """A tokenizer in Hugging Face's format.

    Ids are taken from the file. No tokens are added around a text, except for `begin_of_text`.
    """

    path: FilePath = field(metadata=when_resumed("safe"))
    """The `tokenizer.json`. A relative path starts at the current directory."""
    end_of_text: str = ""
    """The special token that ends a document; empty: the first of `<|endoftext|>`, `<|end_of_text|>`,
    `<｜end▁of▁sentence｜>`, `<eos>` and `</s>` that the file has."""
    begin_of_text: str = ""
    """The special token before every document and prompt, such as `<s>`; `auto`: the tokens that the file puts
    before a text, as the files of Llama 3, Gemma and Mistral do. Empty: none."""

    def build(self, context: BuildContext, documents: Callable[[], Iterable[str]]) -> JsonTokenizer:
        """Load the tokenizer.

        Raises:
            JobError: `problems` has one, or `tokenizers` cannot use the file.
        """
        return self._open(Path(self.path))

    def load(self, context: BuildContext, folder: Path) -> JsonTokenizer:
        """Loads the copy in the folder of the run; `path` is not read."""
        from forge_plugin_text.tokenizer_json import FILE_NAME

        return self._open(folder / FILE_NAME)

    def expected_vocab_size(self) -> int | None:
        """Returns the size of the file's vocabulary; None if it cannot be read."""
        try:
            return self._open(Path(self.path)).vocab_size
        except JobError:  # `problems` reports it
            return None

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that the file can be read, and has the tokens that end and begin documents."""
        path = Path(self.path)
        for token_of in (self._end_of_text, self._begin_of_text):
            try:
                token_of(path, _read(path))
            except JobError as error:
                yield from error.problems
                return

    def _open(self, path: Path) -> JsonTokenizer:
        from forge_plugin_text.tokenizer_json import JsonTokenizer

        content = _read(path)
        begin, end = self._begin_of_text(path, content), self._end_of_text(path, content)
        tokens = JsonTokenizer.own_beginning(content) if begin == OWN else (begin,) * bool(begin)
        return JsonTokenizer(content, end, tokens)

    def _begin_of_text(self, path: Path, content: str) -> str:
        """Returns the key's value, if it is `auto` or a token that may begin a document."""
        tokens = added_tokens(path, content)
        if self.begin_of_text not in ("", OWN, *tokens):
            message = (
                f"{self.begin_of_text!r} is not an added token of {str(path)!r}; name the one that begins a document"
            )
            hint = f'{", ".join(map(repr, tokens)) or "it has none"}; or "{OWN}", or leave the key out'
            raise JobError([Problem("begin_of_text", f"{message}: {hint}")])
        return self.begin_of_text

    def _end_of_text(self, path: Path, content: str) -> str:
        tokens = added_tokens(path, content)
        if self.end_of_text in tokens:
            return self.end_of_text
        usual = [token for token in USUAL_END_OF_TEXT if token in tokens]
        if usual and not self.end_of_text:
            return usual[0]
        asked = f"{self.end_of_text!r} is not" if self.end_of_text else "no usual end-of-text is"
        candidates = ", ".join(map(repr, tokens)) or "it has none"
        message = f"{asked} an added token of {str(path)!r}; name the one that ends a document: {candidates}"
        raise JobError([Problem("end_of_text", message)])


def added_tokens(path: Path, content: str) -> list[str]:
    """Returns the added tokens of the `tokenizer.json` at `path`: those outside its model's vocabulary.

    Raises:
        JobError: the file has another format.
    """
    try:
        return [token["content"] for token in json.loads(content)["added_tokens"]]
    except (ValueError, KeyError, TypeError) as error:
        message = f"{str(path)!r} is not a tokenizer.json ({type(error).__name__}: {error}); give one of that format"
        raise JobError([Problem("path", message)]) from error


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobError([Problem("path", f"{str(path)!r} cannot be read ({error}); correct the path")]) from error
