"""A tokenizer of transformers: text never yields special tokens, and chats mark the assistant's turns."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers
from attrs import frozen
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer
from transformers.utils.hub import cached_file

from forge_core.contracts.errors import JobError, Problem
from forge_kit.data.cache import digest_of
from forge_plugin_huggingface.chat import ChatTemplate, ChatTokens, Messages, Span, Tools, clipped, learned_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
"""Part of the fingerprint: increase it when the same files encode differently."""
TOKENIZER_JSON, CONFIG_JSON = "tokenizer.json", "tokenizer_config.json"
GENERATION_JSON = "generation_config.json"
"""The settings of generation that lie beside a model's tokenizer; `eos_token_id` lists where an answer ends."""
PROCESSOR_JSON = ("preprocessor_config.json", "processor_config.json")
"""Settings of a model's image processor, which lie beside its tokenizer and go where it goes."""
BESIDE = (GENERATION_JSON, *PROCESSOR_JSON)
"""Files beside a tokenizer that say nothing about encodings."""
TEMPLATE_JSON, TEMPLATE_JINJA = "chat_template.json", "chat_template.jinja"
"""Templates of conversations; the first is of old models with images."""
MORE_TEMPLATES = "additional_chat_templates"
"""A folder of further templates of a tokenizer, by name."""
SOURCE, SOURCE_OF = "source", "source.sha256"
"""A folder with the published files, byte for byte: `save_pretrained` writes a form that older versions of transformers
do not load. Beside it, the digest of what transformers made of them, so that a later change of that is noticed."""
PUBLISHED = (
    *(TOKENIZER_JSON, CONFIG_JSON, "special_tokens_map.json", "added_tokens.json", TEMPLATE_JINJA, TEMPLATE_JSON),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("spm.model", "tekken.json"),
)
"""Names of a tokenizer's files; classes of transformers add theirs."""
OWN = "auto"
"""As `begin_of_text`: the tokens that the tokenizer's files put before a text."""
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

    @property
    def encoding(self) -> Mapping[str, bytes]:
        """The files that affect encodings."""
        others = (*BESIDE, SOURCE_OF)
        return {
            name: data for name, data in self.files.items() if name not in others and not name.startswith(f"{SOURCE}/")
        }

    def save(self, folder: Path) -> None:
        """Writes the files as they were loaded, byte for byte, so that the fingerprint stays the same."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def tokenizer(
        self,
        end_of_text: str,
        variables: Mapping[str, Any],
        begin_of_text: str = "",
        placeholders: Sequence[str] = (),
        allow_spelled: bool = False,
    ) -> PretrainedTokenizer:
        """Returns the tokenizer.

        Raises:
            JobError: a token does not exist, or documents would begin with their end.
            JobError: text could spell a token, and that is not allowed.
        """
        end = self._end_of_text(end_of_text)
        begin = self._begin_of_text(begin_of_text, end)
        self._check_placeholders(placeholders)
        return PretrainedTokenizer(self, end, variables, begin, placeholders, allow_spelled)

    def _end_of_text(self, asked: str) -> str:
        token = asked or self.pretrained.eos_token
        if token in self._added:
            return token
        message = f"{asked!r} is not an added token of this tokenizer" if asked else "this tokenizer has no eos_token"
        hint = f"name the one that ends a document: {self._candidates()}"
        raise JobError([Problem("end_of_text", f"{message}; {hint}")])

    def _begin_of_text(self, asked: str, end: str) -> tuple[str, ...]:
        if asked not in ("", OWN, *self._added):
            hint = f'name the one that begins a document: {self._candidates()}; or "{OWN}", or leave the key out'
            message = f"{asked!r} is not an added token of this tokenizer; {hint}"
            raise JobError([Problem("begin_of_text", message)])
        tokens = self._own_beginning() if asked == OWN else (asked,) * bool(asked)
        if end in tokens:
            message = f"{end!r} ends documents, and a document that began with it would be empty"
            hint = "leave begin_of_text out: the end of each document stands before the next one"
            raise JobError([Problem("begin_of_text", f"{message}; {hint}")])
        return tokens

    def _check_placeholders(self, tokens: Sequence[str]) -> None:
        last = sorted(self.pretrained.get_vocab().items(), key=lambda item: item[1])[-len(tokens) :] if tokens else []
        if {token for token, _ in last} != {*tokens} or {*tokens} - {*self._added}:
            hint = f"the vocabulary ends with {', '.join(repr(token) for token, _ in last)}"
            raise JobError([Problem("placeholders", f"{list(tokens)} are not its last added tokens; {hint}")])

    def _own_beginning(self) -> tuple[str, ...]:
        """Returns the tokens that transformers puts before a text."""
        whole, plain = (self.pretrained("a", add_special_tokens=added)["input_ids"] for added in (True, False))
        # Where the plain encoding begins within the one with special tokens
        before = next(n for n in range(len(whole)) if whole[n : n + len(plain)] == plain)
        return tuple(self.pretrained.convert_ids_to_tokens(whole[:before]))

    @property
    def _added(self) -> list[str]:
        return list(self.pretrained.get_added_vocab())

    def _candidates(self) -> str:
        return ", ".join(map(repr, self._added)) or "it has none"


def load_pretrained(path: str, revision: str | None, chat_template: str | None) -> Loaded:
    """Load the tokenizer of a folder or of a repository on the hub; `chat_template` replaces its own."""
    options = {} if revision is None else {"revision": revision}
    pretrained = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    if chat_template is not None:
        pretrained.chat_template = chat_template
    elif pretrained.chat_template is None and (old := _beside(path, TEMPLATE_JSON, options)):
        pretrained.chat_template = json.loads(Path(old).read_text())["chat_template"]
    with tempfile.TemporaryDirectory() as folder:
        # Saved and loaded again, so that a run that continues from these files has the same tokenizer
        pretrained.save_pretrained(folder)
        for name in BESIDE:
            if found := _beside(path, name, options):
                Path(folder, name).write_bytes(Path(found).read_bytes())
        loaded = Loaded.of(Path(folder))
    if (source := _source(path, options, pretrained, chat_template)) is None:
        return loaded
    kept = {f"{SOURCE}/{name}": data for name, data in source.items()}
    return Loaded(loaded.pretrained, {**loaded.files, **kept, SOURCE_OF: _digest(loaded.encoding).encode()})


def _source(
    path: str, options: Mapping[str, Any], pretrained: PreTrainedTokenizerBase, chat_template: str | None
) -> dict[str, bytes] | None:
    """Returns the published files by name, with the template that replaces theirs; None if they are not known."""
    folder = Path(path)
    if (folder / SOURCE).is_dir():  # a run's: transformers has written those beside it
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        if files.get(SOURCE_OF, b"").decode() != _digest(Loaded(pretrained, files).encoding):
            return None  # edited since, so that the published files are no longer these
        found = {name.removeprefix(f"{SOURCE}/"): data for name, data in files.items() if name.startswith(f"{SOURCE}/")}
    else:
        templates = pretrained.chat_template if isinstance(pretrained.chat_template, dict) else ()
        further = [f"{MORE_TEMPLATES}/{name}.jinja" for name in templates]
        names = dict.fromkeys((*PUBLISHED, *pretrained.vocab_files_names.values(), *further))
        files_of = {name: _beside(path, name, options) for name in names}
        found = {name: Path(file).read_bytes() for name, file in files_of.items() if file}
    inside = b'"chat_template"' in found.get(CONFIG_JSON, b"")
    if isinstance(pretrained.chat_template, str) and TEMPLATE_JSON in found and not inside:
        # A tokenizer does not read that file; another is added, as the run has the template
        found.setdefault(TEMPLATE_JINJA, pretrained.chat_template.encode())
    if chat_template is not None:
        theirs = (TEMPLATE_JSON, TEMPLATE_JINJA)
        found = {name: data for name, data in found.items() if name not in theirs and MORE_TEMPLATES not in name}
        found[TEMPLATE_JINJA] = chat_template.encode()
    return found


def _digest(files: Mapping[str, bytes]) -> str:
    return digest_of({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})


def _beside(path: str, name: str, options: Mapping[str, Any]) -> str | None:
    """Returns a file that lies beside the tokenizer; None if there is none, or the hub cannot be reached."""
    quiet = {f"_raise_exceptions_for_{reason}": False for reason in ("missing_entries", "connection_errors")}
    found: str | None = cached_file(path, name, **quiet, **options)
    return found


class PretrainedTokenizer:
    """See `forge_core.contracts.data.Tokenizer` and `forge_plugin_huggingface.chat.PartedChatTokenizer`.

    If there is a `tokenizer.json`, that file encodes, and other code of transformers' class is not used.
    """

    def __init__(
        self,
        loaded: Loaded,
        end_of_text: str,
        variables: Mapping[str, Any],
        begin_of_text: Sequence[str] = (),
        placeholders: Sequence[str] = (),
        allow_spelled: bool = False,
    ) -> None:
        self._allow_spelled = allow_spelled
        self._loaded, self._end_of_text, self._variables = loaded, end_of_text, dict(variables)
        self._begin_of_text, self._placeholders = tuple(begin_of_text), tuple(placeholders)
        self._pretrained = loaded.pretrained
        vocabulary = self._pretrained.get_vocab()
        # Not `len`: ids may have gaps. Placeholders are at the end, and the model has no rows for them.
        self.vocab_size = min((vocabulary[token] for token in placeholders), default=max(vocabulary.values()) + 1)
        self.end_of_text = vocabulary[end_of_text]
        self.begin_of_text = [vocabulary[token] for token in self._begin_of_text]
        self._check_unspellable("end_of_text", self._end_of_text, "that a document could end itself")
        for token in self._begin_of_text:
            self._check_unspellable("begin_of_text", token, "that a document could begin within another")

    def __reduce__(self) -> tuple[Any, ...]:
        tokens = self._end_of_text, self._variables, self._begin_of_text, self._placeholders
        # Rebuilt from its files: a pickled `tokenizers.Tokenizer` loses `encode_special_tokens`
        return PretrainedTokenizer, (self._loaded, *tokens, self._allow_spelled)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, in which special tokens spelt out are plain characters; adds none around it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes as `encode`; with a `tokenizer.json`, in several threads."""
        if not self._is_fast:
            return [self._encode_slowly(text) for text in texts]
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text, without special tokens."""
        ids = [id_ for id_ in ids if id_ not in (self.end_of_text, *self.begin_of_text)]
        return str(self._pretrained.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def save(self, folder: Path) -> None:
        """Writes the tokenizer's files, together with the settings of generation and of image processing."""
        self._loaded.save(folder)

    def fingerprint(self) -> str:
        """Covers all files that affect encodings, the job's keys, and transformers' version where its code encodes."""
        # A tokenizer without tokenizer.json is code of transformers.
        code = "" if self._is_fast else f"{type(self._pretrained).__qualname__} {transformers.__version__}"
        files = {name: _content(name, data) for name, data in self._loaded.encoding.items()}
        # Nothing where there is none, so that older fingerprints stay valid
        begin = [self.begin_of_text] * bool(self.begin_of_text)
        return digest_of("huggingface", FORMAT, files, self._end_of_text, self._variables, code, *begin)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token by its name, such as `<|im_end|>`; None if it is not an added one."""
        return self._pretrained.get_added_vocab().get(token)

    def stop_ids(self) -> list[int]:
        """Returns the ids at which generation stops.

        They are the end-of-text, the tokenizer's own `eos_token`, the ids in `generation_config.json`, and the special
        token that the chat template writes after an answer.
        """
        found = [self.end_of_text, self._pretrained.eos_token_id, *self._listed_ends()]
        if self._pretrained.chat_template and (token := self._template.end_of_turn()):
            found.append(self.token_id(token))
        return sorted({id_ for id_ in found if id_ is not None})

    def _listed_ends(self) -> list[int]:
        listed = json.loads(self._loaded.files.get(GENERATION_JSON, b"{}")).get("eos_token_id")
        # One id, a list of ids, or null
        return listed if isinstance(listed, list) else [listed]

    def check_chat(self) -> None:
        """Raise `JobError` if this tokenizer cannot encode chats."""
        if not self._is_fast:
            raise JobError("this tokenizer has no tokenizer.json, which chats need to know which token is whose")
        _ = self._template

    def chat(self, messages: Messages, tools: Tools = None, learned: Sequence[bool] | None = None) -> ChatTokens:
        """Encode a conversation as its template writes it; `learned` messages, or the assistant's turns, are learned.

        Special tokens spelt out in a message are special tokens, as with `apply_chat_template`.

        Raises:
            JobError: the template refuses the conversation, or does not show which part is the assistant's.
        """
        rendered = self._template.render(messages, tools, learned)
        return self._begun(self._checked(self._chat_tokens(rendered.text, rendered.spans)))

    def chat_prompt(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Returns the ids of a conversation up to where the assistant's next answer begins; raises as `chat`."""
        text = self._template.prompt(messages, tools)
        return self._begun(self._checked(self._chat_tokens(text, ()))).ids.tolist()

    @property
    def chat_template(self) -> str:
        """The template of conversations; empty if there is none."""
        return str(self._pretrained.chat_template or "")

    def chat_text(self, messages: Messages, tools: Tools = None, *, goes_on: bool = False) -> str:
        """Returns the text of a conversation up to where the assistant's next answer begins; raises as `chat`.

        Args:
            messages: the conversation.
            tools: as in `chat`.
            goes_on: whether the answer continues the last message instead.
        """
        return self._template.prompt(messages, tools, goes_on=goes_on)

    def encode_special(self, text: str) -> list[int]:
        """Encode a text whose special tokens, spelt out, are special tokens, such as one of `chat_text`."""
        return self._checked(self._chat_tokens(text, ())).ids.tolist()

    def chat_parts(self, messages: Messages, mark: str, tools: Tools = None) -> list[ChatTokens]:
        """See `forge_plugin_huggingface.chat.PartedChatTokenizer`; raises as `chat`."""
        return [part for part, _ in self.chat_pieces(messages, [mark], tools)]

    def chat_pieces(
        self, messages: Messages, marks: Sequence[str], tools: Tools = None
    ) -> list[tuple[ChatTokens, str]]:
        """See `forge_plugin_huggingface.chat.PartedChatTokenizer`; raises as `chat`."""
        rendered = self._template.render(messages, tools)
        ids = {mark: self._with_special_tokens.token_to_id(mark) for mark in marks}
        tokens = {id_: mark for mark, id_ in ids.items() if id_ is not None}
        pieces: list[tuple[ChatTokens, str]] = []
        start = 0
        for text, mark in _cut(rendered.text, [mark for mark in marks if ids[mark] is None]):
            chat = self._chat_tokens(text, clipped(rendered.spans, start, start + len(text)))
            pieces += _cut_at_tokens(chat if pieces else self._begun(chat), tokens, mark)
            # Spans are counted in the whole text, with its marks.
            start += len(text) + len(mark)
        return [(self._checked(part), mark) for part, mark in pieces]

    def _chat_tokens(self, text: str, spans: Sequence[Span]) -> ChatTokens:
        encoding = self._with_special_tokens.encode(text, add_special_tokens=False)
        return ChatTokens(np.array(encoding.ids, np.int64), learned_tokens(encoding.offsets, spans))

    def _checked(self, chat: ChatTokens) -> ChatTokens:
        """Returns a chat; raises `JobError` for one with a placeholder, for which the model has no row."""
        if self._placeholders and (chat.ids >= self.vocab_size).any():
            names = ", ".join(self._placeholders)
            raise JobError(f"a conversation has {names} where nothing stands for it; take it out of the text")
        return chat

    def _begun(self, chat: ChatTokens) -> ChatTokens:
        """Returns a chat that begins with the beginning of text, which its template may have written."""
        begin = self.begin_of_text
        if chat.ids[: len(begin)].tolist() == begin:
            return chat
        return ChatTokens(np.append(begin, chat.ids), np.append(np.zeros(len(begin), bool), chat.learned))

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
        around = [self._end_of_text, *self._begin_of_text]
        # `encode_special_tokens` applies to special tokens only, and the file may have these as ordinary ones.
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in around])
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _encode_slowly(self, text: str) -> list[int]:
        return self._pretrained(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    def _check_unspellable(self, key: str, text: str, consequence: str) -> None:
        id_ = self._pretrained.get_vocab()[text]
        # By itself, within a word, and between spaces, where pieces of Unigram models begin
        if not any(id_ in ids for ids in self.encode_batch([text, f"a{text}b", f" {text} "])):
            return
        name = key.replace("_", "-")
        message = f"this tokenizer encodes the characters {text!r} in a text as its {name}, id {id_}, so {consequence}"
        if not self._allow_spelled:
            hint = f'set {key} to a token that text cannot spell, or, if no text has it, spelled_tokens to "warn"'
            raise JobError(f"{message}; {hint}")
        warnings.warn(message, stacklevel=2)


def _cut(text: str, marks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the parts of a text between marks, each with the mark behind it; the last has none."""
    end = 0
    for found in re.finditer("|".join(map(re.escape, marks)), text) if marks else ():
        yield text[end : found.start()], found.group()
        end = found.end()
    yield text[end:], ""


def _cut_at_tokens(chat: ChatTokens, tokens: Mapping[int, str], mark: str) -> Iterator[tuple[ChatTokens, str]]:
    """Yields the parts of a chat between tokens that are marks; behind the last one is `mark`."""
    start = 0
    for end in np.flatnonzero(np.isin(chat.ids, list(tokens))).tolist():
        yield ChatTokens(chat.ids[start:end], chat.learned[start:end]), tokens[int(chat.ids[end])]
        start = end + 1
    yield ChatTokens(chat.ids[start:], chat.learned[start:]), mark


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
