"""`forge-run chat`: a conversation with a trained model, by its chat template."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.cli.command_line import positive, with_examples
from forge_core.contracts.errors import ForgeError, JobError
from forge_kit.tools.ranks import ranks_asked_for
from forge_plugin_generate.options import add_run, add_settings, check_path, check_speculation, separated
from forge_plugin_generate.prompts import chat_ids
from forge_plugin_generate.streaming import TextStream
from forge_plugin_generate.terminal import Conversation, write

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_plugin_generate.command import Continuing
    from forge_plugin_generate.stops import Stops

Message = dict[str, str]
Answer = Callable[..., Sequence[Sequence[int]]]
"""Continues prompts: ids of each, and `until` of `generate` -> ids of each answer."""


HEADING = "use"


def command(argv: list[str]) -> int:
    """Talk with a trained model, by its chat template."""
    parser = argparse.ArgumentParser("forge-run chat", description=command.__doc__)
    add_run(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="the system's message")
    add_settings(parser)
    with_examples(
        parser,
        "forge-run chat runs/chat",
        'echo "Which sea is the deepest?" | forge-run chat runs/chat --temperature 0',
    )
    # Known to say why not, instead of "unrecognized"
    parser.add_argument("--nproc", type=positive, metavar="N", help=argparse.SUPPRESS)
    options = separated(parser, argv)
    check_speculation(parser, options)
    if ranks_asked_for(options.nproc) > 1:
        hint = f"ask several ranks by: forge-run generate {options.path} --chat --prompt TEXT --nproc N"
        raise JobError(f"chat reads standard input, which ranks do not have; use one process, or {hint}")
    check_path(Path(options.path), options.device)
    from forge_plugin_generate.command import Continuing, load_trained
    from forge_plugin_generate.stops import Stops

    # Called before the model is loaded, so that a missing template does not wait for it
    check = partial(check_chat, path=options.path)
    trained = load_trained(options.path, options.device, options.run, check, options.overrides)
    stops = Stops.of(trained.tokenizer, options.stop or ())
    return talk(stops, Continuing(trained, options, stops), options, trained.job.train.seq_len)


def check_chat(tokenizer: Tokenizer, path: str) -> None:
    """Check that a tokenizer writes chats; raises a `JobError` that offers plain prompts."""
    try:
        chat_ids(tokenizer, [_message("user", "?")])
    except JobError as error:
        hint = f"plain texts are continued by: forge-run generate {path} --interactive"
        raise JobError(f"{error}\n{hint}") from error


def first_turn(tokenizer: Tokenizer, system: str, question: str) -> list[int]:
    """Returns the ids of a conversation that a question begins; raises `JobError` as `chat_ids` does."""
    return chat_ids(tokenizer, [*_begun(system), _message("user", question)])


def talk(stops: Stops, answer: Continuing, options: argparse.Namespace, seq_len: int) -> int:
    """Answer each line of standard input in one conversation, until it ends; returns the exit code."""
    chat = Chat(stops, answer, options, seq_len, answer.report)
    if sys.stdin.isatty():
        print("/help lists commands, Ctrl-C ends an answer, Ctrl-D leaves")
    return Conversation(options, chat.answer, chat.commands()).run()


class Chat:
    """One conversation.

    Args:
        stops: where answers end; its tokenizer writes conversations by its template.
        answer: continues ids.
        options: `system`, its first message, and `seed`, which `/retry` changes.
        seq_len: positions that the model was trained with.
        report: is called behind each answer.
    """

    def __init__(
        self,
        stops: Stops,
        answer: Answer,
        options: argparse.Namespace,
        seq_len: int,
        report: Callable[[], object] = lambda: None,
    ) -> None:
        self._stops, self._continue, self._options, self._seq_len = stops, answer, options, seq_len
        self._report = report
        self.messages = _begun(options.system)
        self._has_warned = False

    def commands(self) -> dict[str, tuple[str, Callable[[str], Any]]]:
        """Returns the commands that a conversation accepts in addition to messages."""
        return {
            "reset": ("begin a new conversation", lambda text: self.reset()),
            "system": ("begin a new conversation with this message of the system; none without a text", self.begin),
            "retry": ("answer the last message again, with the next seed", lambda text: self.retry()),
        }

    def reset(self) -> None:
        """Begin a new conversation with the same message of the system."""
        self.messages = _begun(self._options.system)

    def begin(self, system: str) -> None:
        """Begin a new conversation with this message of the system."""
        self._options.system = system
        self.reset()

    def retry(self) -> None:
        """Answer the last message again."""
        questions = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
        if not questions:
            raise ForgeError("/retry: nothing was asked yet")
        question = self.messages[questions[-1]]["content"]
        # With its answer: `answer` adds the question again
        del self.messages[questions[-1] :]
        self._options.seed += 1
        self.answer(question)

    def answer(self, text: str) -> None:
        """Write the answer to a message as it is made. One that is interrupted stays as far as it came."""
        self.messages.append(_message("user", text))
        stream = TextStream(self._stops, write)
        try:
            # The whole conversation is read again for each answer: a template may write earlier turns in another way.
            ids = chat_ids(self._stops.tokenizer, self.messages)
            self._warn_of_length(len(ids))
            [row] = self._continue([ids], until=stream.show)
        except ForgeError:
            self.messages.pop()  # as if it had not been asked
            raise
        except KeyboardInterrupt:
            # The part that was written stays in the conversation, as the next message may refer to it
            self.messages.append(_message("assistant", stream.text))
            raise
        stream.finish(row)
        print(flush=True)
        self._report()
        self.messages.append(_message("assistant", stream.text))

    def _warn_of_length(self, length: int) -> None:
        if length + self._options.max_tokens > self._seq_len and not self._has_warned and sys.stdin.isatty():
            # Once, and no error: many encodings of positions work beyond the trained length
            self._has_warned = True
            limit = f"the model was trained with {self._seq_len} positions (train.seq_len)"
            print(f"({length} tokens so far; {limit}; /reset begins a new conversation)", file=sys.stderr)


def _begun(system: str) -> list[Message]:
    return [_message("system", system)] if system else []


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
