"""Tokenizer `auto`: any that transformers' `AutoTokenizer` finds in a folder or on the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import field, frozen

from forge_core.contracts.components import FilePath, TokenizerComponent, when_resumed
from forge_core.contracts.errors import JobError, Problem
from forge_plugin_huggingface.hub import expanded, explained, local_problem, offline

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_huggingface.transformers_tokenizer import Loaded, PretrainedTokenizer

GIVEN = (
    *("messages", "tools", "documents", "add_generation_prompt", "conversation", "chat_template", "tokenize"),
    *("continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""Names that `apply_chat_template` passes to a template itself, or uses as its own arguments."""


@frozen(kw_only=True)
class Auto(TokenizerComponent):
    """A tokenizer of Hugging Face's transformers, with its chat template.

    Ids come from the tokenizer's own files. No tokens are added around a text except `begin_of_text`, and special
    tokens spelt out in a text stay text. Code from the hub is never run.
    """

    chats: ClassVar[bool] = True
    """Whether `build` returns a `forge_plugin_huggingface.chat.ChatTokenizer`."""

    path: FilePath = field(metadata=when_resumed("safe"))
    """A folder that `save_pretrained` wrote, or the name of a repository on the hub."""
    revision: str = ""
    """Branch, tag or commit on the hub; empty: its default branch."""
    end_of_text: str = ""
    """The token that ends a document; empty: the tokenizer's own (`eos_token`). Where that ends every turn of a chat,
    as in many chat models, name the one that the base model was trained with, such as `<|endoftext|>`."""
    begin_of_text: str = ""
    """The token before every document, chat and prompt, such as `<s>`; `auto`: those that its files put before a text,
    as Llama 3's, Gemma's and Mistral's do. Empty: none. A chat whose template writes it gets no second one."""
    placeholders: tuple[str, ...] = ()
    """Tokens at the end of the vocabulary that only mark where something else stands, and for which the model has no
    row: `<|image|>` of Llama 3.2 Vision. They are not counted in its size, and no text may have them."""
    spelled_tokens: Literal["refuse", "warn"] = field(default="refuse", metadata=when_resumed("safe"))
    """Where a text with the characters of `end_of_text` or `begin_of_text` is encoded as that token, as by vocabularies
    of words (of proteins, chess, music): refuse the tokenizer; or warn, for texts that do not have these characters."""
    chat_template: FilePath = ""
    """File with a Jinja template for chats, in place of the tokenizer's own."""
    chat_variables: Mapping[str, str | bool | int | float] = field(factory=dict)
    """Further variables of the template, such as `enable_thinking` or `date_string`."""

    def build(self, context: BuildContext, documents: Callable[[], Iterable[str]]) -> PretrainedTokenizer:
        """Load the tokenizer.

        Raises:
            JobError: `problems` has one, or transformers cannot load the tokenizer.
        """
        return self._pretrained()

    def build_locally(self, context: BuildContext) -> PretrainedTokenizer:
        """Load the tokenizer without the network; see `forge_plugin_plan.lines.BuildsLocally`.

        Raises:
            JobError: it is neither in a folder nor in the cache of the hub, or cannot be used.
        """
        try:
            with offline():
                return self._pretrained()
        except JobError as error:
            # Of a folder, or of another key than the path, the message is the better one
            if Path(self.path).is_dir() or any(problem.path != "path" for problem in error.problems):
                raise
            where = "is neither a folder nor in the cache of the hub, and no network is used here"
            raise JobError(f"the tokenizer {self.path!r} {where}") from error

    def expected_vocab_size(self) -> int | None:
        """Returns the size of a local tokenizer; None if it is on the hub."""
        if not Path(self.path).is_dir():
            return None
        try:
            return self._pretrained().vocab_size
        except JobError:  # the run reports it
            return None

    def _pretrained(self) -> PretrainedTokenizer:
        from forge_plugin_huggingface.transformers_tokenizer import load_pretrained

        template = _read(self.chat_template) if self.chat_template else None
        # Only around the library: errors about our keys name these keys themselves
        with explained(self.path):
            loaded = load_pretrained(expanded(self.path), self.revision or None, template)
        return self._of(loaded)

    def load(self, context: BuildContext, folder: Path) -> PretrainedTokenizer:
        """Loads the files that the run saved, with the job's keys: neither `path` nor the hub is read."""
        from forge_plugin_huggingface.transformers_tokenizer import Loaded

        with explained(str(folder)):
            loaded = Loaded.of(folder)
        return self._of(loaded)

    def _of(self, loaded: Loaded) -> PretrainedTokenizer:
        return loaded.tokenizer(
            self.end_of_text, self.chat_variables, self.begin_of_text, self.placeholders, self.spelled_tokens == "warn"
        )

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the path, the template and its variables, without the network and without loading the tokenizer."""
        if message := local_problem(self.path):
            yield Problem("path", message)
        if self.revision and Path(self.path).is_dir():
            yield Problem("revision", f"{self.revision!r} is of the hub, but {self.path!r} is a folder; leave it out")
        if self.chat_template:
            try:
                _read(self.chat_template)
            except JobError as error:
                yield from error.problems
        for name in sorted(self.chat_variables.keys() & set(GIVEN)):
            yield Problem(
                f"chat_variables.{name}", "this name stands for something else in apply_chat_template; leave it out"
            )


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path!r} cannot be read ({error}); give a file with a Jinja template"
        raise JobError([Problem("chat_template", message)]) from error
