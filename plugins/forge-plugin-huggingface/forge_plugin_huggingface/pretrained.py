"""A tokenizer of transformers: text never yields special tokens, and chats mark the assistant's turns."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers
from attrs import frozen
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from forge_core.contracts.errors import JobError, Problem
from forge_kit.cache import digest_of
from forge_plugin_huggingface.chat import ChatTemplate, ChatTokens, Messages, Span, Tools, clipped, learned_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
"""Part of the fingerprint: increase it when the same files encode differently."""
TOKENIZER_JSON, CONFIG_JSON = "tokenizer.json", "tokenizer_config.json"
WHERE_IT_CAME_FROM = ("is_local", "local_files_only", "name_or_path")
"""Entries of `tokenizer_config.json` that do not affect encodings."""


@frozen
class Loaded:
    """The tokenizer of transformers, and the files that it saves: all inputs of an encoding."""

    pretrained: PreTrainedTokenizerBase
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, folder: Path) -> Loaded:
        """Load the folder that `save` wrote, with its files unchanged."""
        pretrained = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return cls(pretrained, {str(path.relative_to(folder)): path.read_bytes() for path in paths})

    def save(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def tokenizer(self, end_of_text: str, variables: Mapping[str, Any]) -> PretrainedTokenizer:
        """Returns the tokenizer; raises `JobError` if the end-of-text does not exist, or text could spell it."""
        return PretrainedTokenizer(self, self._end_of_text(end_of_text), variables)

    def _end_of_text(self, asked: str) -> str:
        added = list(self.pretrained.get_added_vocab())
        token = asked or self.pretrained.eos_token
        if token in added:
            return token
        message = f"{asked!r} is not an added token of this tokenizer" if asked else "this tokenizer has no eos_token"
        candidates = ", ".join(map(repr, added)) or "it has none"
        raise JobError([Problem("end_of_text", f"{message}; name the one that ends a document: {candidates}")])


def load_pretrained(path: str, revision: str | None, chat_template: str | None) -> Loaded:
    """Load the tokenizer of a folder or of a repository on the hub; `chat_template` replaces its own."""
    options = {} if revision is None else {"revision": revision}
    pretrained = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    if chat_template is not None:
        pretrained.chat_template = chat_template
    with tempfile.TemporaryDirectory() as folder:
        pretrained.save_pretrained(folder)
        return Loaded.of(Path(folder))


class PretrainedTokenizer:
    """See `forge_core.contracts.data.Tokenizer` and `forge_plugin_huggingface.chat.PartedChatTokenizer`.

    If there is a `tokenizer.json`, that file encodes, and other code of transformers' class is not used.
    """

    def __init__(self, loaded: Loaded, end_of_text: str, variables: Mapping[str, Any]) -> None:
        self._loaded, self._end_of_text, self._variables = loaded, end_of_text, dict(variables)
        self._pretrained = loaded.pretrained
        vocabulary = self._pretrained.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_text = vocabulary[end_of_text]
        self._check_end_of_text()

    def __reduce__(self) -> tuple[Any, ...]:
        return PretrainedTokenizer, (self._loaded, self._end_of_text, self._variables)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._is_fast:
            return [self._encode_slowly(text) for text in texts]
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text, without special tokens."""
        ids = [id_ for id_ in ids if id_ != self.end_of_text]
        return str(self._pretrained.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        self._loaded.save(folder)

    def fingerprint(self) -> str:
        # A tokenizer without tokenizer.json is code of transformers.
        code = "" if self._is_fast else f"{type(self._pretrained).__qualname__} {transformers.__version__}"
        files = {name: _content(name, data) for name, data in self._loaded.files.items()}
        return digest_of("huggingface", FORMAT, files, self._end_of_text, self._variables, code)

    def check_chat(self) -> None:
        """Raise `JobError` if this tokenizer cannot encode chats."""
        if not self._is_fast:
            raise JobError("this tokenizer has no tokenizer.json, which chats need to know which token is whose")
        _ = self._template

    def chat(self, messages: Messages, tools: Tools = None) -> ChatTokens:
        """Encode a conversation as its template writes it; the assistant's turns are learned.

        Special tokens spelt out in a message are special tokens, as with `apply_chat_template`.

        Raises:
            JobError: the template refuses the conversation, or does not show which part is the assistant's.
        """
        rendered = self._template.render(messages, tools)
        return self._chat_tokens(rendered.text, rendered.spans)

    def chat_parts(self, messages: Messages, mark: str, tools: Tools = None) -> list[ChatTokens]:
        """See `forge_plugin_huggingface.chat.PartedChatTokenizer`; raises as `chat`."""
        rendered = self._template.render(messages, tools)
        token = self._with_special_tokens.token_to_id(mark)
        if token is not None:
            whole = self._chat_tokens(rendered.text, rendered.spans)
            at = np.flatnonzero(whole.ids == token)
            bounds = zip([0, *(at + 1)], [*at, len(whole.ids)], strict=True)
            return [ChatTokens(whole.ids[start:end], whole.learned[start:end]) for start, end in bounds]
        parts, start = [], 0
        for text in rendered.text.split(mark):
            parts.append(self._chat_tokens(text, clipped(rendered.spans, start, start + len(text))))
            start += len(text) + len(mark)
        return parts

    def _chat_tokens(self, text: str, spans: Sequence[Span]) -> ChatTokens:
        encoding = self._with_special_tokens.encode(text, add_special_tokens=False)
        return ChatTokens(np.array(encoding.ids, np.int64), learned_tokens(encoding.offsets, spans))

    @property
    def _is_fast(self) -> bool:
        return TOKENIZER_JSON in self._loaded.files

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._pretrained, self._variables)

    @cached_property
    def _with_special_tokens(self) -> Tokenizer:
        return _from_json(self._loaded.files[TOKENIZER_JSON])

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer that encodes special tokens in a text as plain characters."""
        tokenizer = _from_json(self._loaded.files[TOKENIZER_JSON])
        tokenizer.add_special_tokens([AddedToken(self._end_of_text, special=True, normalized=False)])
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _encode_slowly(self, text: str) -> list[int]:
        return self._pretrained(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    def _check_end_of_text(self) -> None:
        text = self._end_of_text
        if any(self.end_of_text in ids for ids in self.encode_batch([text, f"a{text}b", f" {text} "])):
            raise JobError(
                f"this tokenizer encodes the characters {text!r} in a text as its end-of-text, id {self.end_of_text}, "
                "so that a document could end itself; set end_of_text to a token that text cannot spell"
            )


def _from_json(content: bytes) -> Tokenizer:
    """Load a tokenizer.json without its truncation, padding and post-processor.

    The post-processor would also cut spaces from the offsets of tokens.
    """
    nothing = {"truncation": None, "padding": None, "post_processor": None}
    return Tokenizer.from_str(json.dumps(json.loads(content) | nothing))


def _content(name: str, data: bytes) -> Any:
    """Returns the part of a file that encodings depend on."""
    if name != CONFIG_JSON:
        return digest_of(data.hex())
    return {key: value for key, value in json.loads(data).items() if key not in WHERE_IT_CAME_FROM}
