"""Renders conversations by the tokenizer's template, and finds the assistant's parts of the text.

Templates mark these with `{% generation %}`; otherwise they are found by rendering the conversation up to each answer.
Either way the text is checked to be the one that the template renders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from forge_core.contracts.errors import JobError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around the assistant's parts while a template is rendered: code points that Unicode reserves internally."""
PROBE = "\ufdd3"
"""Stands for the content of a message when its beginning or the end of turns is looked for."""
GENERATION = re.compile(r"(\{%[-+]?)\s*generation\s*([-+]?%\})")
END_GENERATION = re.compile(r"(\{%[-+]?)\s*endgeneration\s*([-+]?%\})")
TODAY = "strftime_now"
"""A function that templates may call for the date."""
NO_TODAY = (
    f"{{% macro {TODAY}(format) %}}{{{{ raise_exception('it uses the current date, so that no two days would give "
    "the same tokens; set the date in [data.tokenizer.chat_variables], often as date_string') }}{% endmacro %}\n"
)
FIX = (
    "give a template that marks the assistant's turns with {% generation %} and {% endgeneration %}, as the key "
    "chat_template of [data.tokenizer]"
)

Messages = Sequence[Mapping[str, Any]]
Tools = list[dict[str, Any]] | None
"""JSON schemas of the functions that the assistant may call."""
Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""


class UnclearTurns(JobError):
    """A chat template does not show which part of the text is the assistant's."""


class ChatTokens(NamedTuple):
    """A tokenised conversation of n tokens."""

    ids: np.ndarray
    """(n,) int64."""
    learned: np.ndarray
    """(n,) bool: the assistant's tokens, with those that end a turn."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: Sequence[Span]
    """The assistant's parts, ascending."""


@runtime_checkable
class ChatTokenizer(Protocol):
    """A tokenizer with a chat template."""

    def check_chat(self) -> None:
        """Raise `JobError` if it cannot encode chats."""

    def chat(self, messages: Messages, tools: Tools = None, learned: Sequence[bool] | None = None) -> ChatTokens:
        """Encode a conversation, with the beginning of text once.

        Args:
            messages: the conversation.
            tools: what the assistant may call.
            learned: whether each message is learned; None, and left out where it is None: all of the assistant's.

        Raises:
            JobError: it cannot be encoded, or the template does not show which part a learned message is.
        """
        ...


@runtime_checkable
class PartedChatTokenizer(ChatTokenizer, Protocol):
    """A tokenizer of chats that have something other than text in them, such as images."""

    def chat_parts(self, messages: Messages, mark: str, tools: Tools = None) -> Sequence[ChatTokens]:
        """Encode a conversation as `chat` does, cut at each `mark` in its text: one part more than there are marks.

        A mark that is a token of the tokenizer's own is cut out as that token, any other one as these characters.
        """
        ...

    def chat_pieces(
        self, messages: Messages, marks: Sequence[str], tools: Tools = None
    ) -> Sequence[tuple[ChatTokens, str]]:
        """Encode a conversation likewise, cut at each of several marks: parts, each with the mark behind it.

        Behind the last part there is none, an empty text.
        """
        ...


class ChatTemplate:
    """Renders conversations with the template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
        """Prepare the template with further variables; raises `JobError` if the tokenizer has none."""
        if not tokenizer.chat_template:
            hint = "name a file with one as chat_template of [data.tokenizer]"
            raise JobError(f"this tokenizer has no chat template; {hint}")
        self._tokenizer, self._variables = tokenizer, variables
        # A tuple, as `str.endswith` takes several suffixes in this form only
        self._special = tuple(tokenizer.get_added_vocab())

    def render(self, messages: Messages, tools: Tools, learned: Sequence[bool] | None = None) -> Rendered:
        """Render a conversation.

        Args:
            messages: the conversation.
            tools: what the assistant may call.
            learned: whether each message is to be in `Rendered.spans`; None: all of the assistant's.

        Raises:
            JobError: the template refuses it, or does not show which part of the text a message is.
        """
        template = self._tokenizer.get_chat_template(None, tools)
        text = self._text(template, messages, tools)
        if BEGIN in text or END in text:
            raise JobError("it has the code point U+FDD0 or U+FDD1, which are not characters; take it out")
        is_marked = GENERATION.search(template) is not None
        if is_marked and learned is None:
            return Rendered(text, self._marked_spans(text, _with_marks(template), messages, tools))
        is_answer = [message["role"] == ASSISTANT for message in messages]
        chosen = [number for number, wanted in enumerate(is_answer if learned is None else learned) if wanted]
        spans: list[Span] = []
        for number in chosen:
            if not is_answer[number]:
                spans.append(self._other(number, text, template, messages, tools))
            elif is_marked:
                spans += self._marked_answer(number, text, _with_marks(template), messages, tools)
            else:
                spans.append(self._answer(number, text, template, messages, tools))
        return Rendered(text, spans)

    def prompt(self, messages: Messages, tools: Tools, *, goes_on: bool = False) -> str:
        """Returns the text of a conversation with the beginning of an answer; raises `JobError` as `render`.

        With `goes_on`, the answer continues the last message, at whose text the conversation ends.
        """
        template = self._tokenizer.get_chat_template(None, tools)
        return self._text(template, messages, tools, prompt=not goes_on, goes_on=goes_on)

    def end_of_turn(self) -> str | None:
        """Returns the special token that the template writes after an answer; None if it does not show one."""
        messages = [{"role": "user", "content": "question"}, {"role": ASSISTANT, "content": PROBE}]
        try:
            text = self._text(self._tokenizer.get_chat_template(None, None), messages, None)
        except (JobError, ValueError):  # it wants other messages, or tools, which the caller may have
            return None
        rest = text.rpartition(PROBE)[2].lstrip() if PROBE in text else ""
        # The longest: a special token may begin with another one
        return max((token for token in self._special if rest.startswith(token)), key=len, default=None)

    def _text(
        self, template: str, messages: Messages, tools: Tools, prompt: bool = False, goes_on: bool = False
    ) -> str:
        """Returns the text of messages; with `prompt` it ends with the beginning of an answer."""
        from jinja2 import TemplateError

        # A macro of this name hides the function, so that a call raises an error instead
        guard = NO_TODAY if TODAY in template else ""
        # `problems` refuses variables with a name of `auto.GIVEN`, which would replace the other options.
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt, **self._variables}
        options |= {"continue_final_message": True} if goes_on else {}
        chat: Any = list(messages)
        try:
            return str(
                self._tokenizer.apply_chat_template(chat, chat_template=guard + template, tokenize=False, **options)
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise JobError(f"the chat template fails on it: {error}") from error

    def _marked_spans(self, text: str, marked: str, messages: Messages, tools: Tools) -> list[Span]:
        """Returns the parts that the template marks itself, which it may do within macros."""
        pieces = re.split(f"([{BEGIN}{END}])", self._text(marked, messages, tools))
        spans, start, position = [], None, 0
        for piece in pieces:
            if piece == BEGIN and start is None:
                start = position
            elif piece == END and start is not None:
                spans.append((start, position))
                start = None
            elif piece in (BEGIN, END):
                raise JobError("the chat template puts one {% generation %} into another; they must follow each other")
            else:
                position += len(piece)
        if "".join(piece for piece in pieces if piece not in (BEGIN, END)) != text:
            raise JobError(f"the chat template changes the text that its {{% generation %}} gives; {FIX} around it all")
        return spans

    def _marked_answer(self, number: int, text: str, marked: str, messages: Messages, tools: Tools) -> Sequence[Span]:
        """Returns the parts that the template marks of one answer: those behind the conversation up to it."""
        spans, whole = self._marked_spans(text, marked, messages, tools), self._text(marked, messages, tools)
        # Many templates refuse a conversation without a message
        before = self._shared(number, whole, self._text(marked, messages[:number], tools)) if number else 0
        after = self._shared(number, whole, self._text(marked, messages[: number + 1], tools))
        found = spans[whole.count(BEGIN, 0, before) : whole.count(BEGIN, 0, after)]
        if not found:
            problem = f"the chat template marks no part of message {number} by {{% generation %}}"
            raise UnclearTurns(f"{problem}, so that it does not show which part is the assistant's; {FIX}")
        return found

    def _answer(self, number: int, text: str, template: str, messages: Messages, tools: Tools) -> Span:
        """Returns the text that an answer adds to the conversation before it and the generation prompt."""
        # The generation prompt is not learned: at inference it is given.
        before = self._text(template, messages[:number], tools, prompt=True)
        after = self._text(template, messages[: number + 1], tools)
        end = self._shared(number, text, after)
        if not after[:end].startswith(before):
            raise _otherwise(number)
        return len(before), self._end_of_turn(after[:end], len(before))

    def _shared(self, number: int, whole: str, beginning: str) -> int:
        """Returns how far the text of the messages up to `number` is that of the whole conversation.

        That is all of it, but for a token that some templates write behind the last turn, as Phi-3's do.
        """
        if whole.startswith(beginning):
            return len(beginning)
        blank = f" \n{BEGIN}{END}"
        head = beginning.rstrip(blank)
        last = max((token for token in self._special if head.endswith(token)), key=len, default="")
        head = head.removesuffix(last).rstrip(blank)
        # The turn must have ended without that token: else it is the end of this turn, and another one in the whole
        if last and head.endswith(self._special) and whole.startswith(head):
            return len(head)
        raise _otherwise(number)

    def _other(self, number: int, text: str, template: str, messages: Messages, tools: Tools) -> Span:
        """Returns the content of a message that is not the assistant's, with the token that ends its turn.

        No generation prompt shows where it begins. The template must therefore write the content as it is.
        """
        message = messages[number]
        content, begin = message.get("content"), None
        if isinstance(content, str) and content.strip():
            probe = {**message, "content": PROBE}
            # Many templates refuse a conversation without a message
            before = self._text(template, messages[:number], tools) if number else ""
            after = self._text(template, messages[: number + 1], tools)
            probed = self._text(template, [*messages[:number], probe], tools)
            head, _, tail = probed.partition(PROBE)
            written = [head + part + tail for part in (content, content.strip())]
            if head.startswith(before) and after in written and text.startswith(after):
                begin = len(head)
        if begin is None:
            role = message["role"]
            problem = f"message {number} of role {role!r} has train = true, but the chat template does not show which"
            raise UnclearTurns(f"{problem} part of the text its content is; leave train out there")
        return begin, self._end_of_turn(after, begin)

    def _end_of_turn(self, text: str, start: int) -> int:
        """Returns the end of the answer that begins at `start` and is the last part of `text`.

        White space after a special token is not part of it, as generation stops at that token.
        """
        answer = text[start:].rstrip()
        return start + len(answer) if answer.endswith(self._special) else len(text)


def learned_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Returns (n,) bool: true for tokens that overlap a span.

    Args:
        offsets: span of each of n tokens in the text, ascending.
        spans: the learned parts of the text.
    """
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    learned = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        # From the first token that ends behind `start` to the last that begins before `end`
        learned[np.searchsorted(ends, start, "right") : np.searchsorted(starts, end, "left")] = True
    return learned


def clipped(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """Returns the spans within a part of a text, counted from its start."""
    return [(max(a, start) - start, min(b, end) - start) for a, b in spans if a < end and b > start]


def _otherwise(number: int) -> UnclearTurns:
    problem = f"the chat template writes the conversation up to message {number} otherwise than in the whole"
    return UnclearTurns(f"{problem}, so that it does not show which part is the assistant's; {FIX}")


def _with_marks(template: str) -> str:
    """Replace the template's `generation` blocks by marks.

    White space around the tags does not change: each tag becomes a block that keeps the tag's outer sides.
    """
    begin = rf"\1 if true %}}{{{{ '{BEGIN}' }}}}{{% if true \2"
    end = rf"\1 endif %}}{{{{ '{END}' }}}}{{% endif \2"
    return END_GENERATION.sub(end, GENERATION.sub(begin, template))
