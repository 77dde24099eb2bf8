"""Conversations of a row: chat messages, and which of them are learned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from forge_core.contracts.errors import JobError
from forge_plugin_huggingface.chat import ASSISTANT, Tools

Learn = Literal["all", "last"]
TRAIN, WEIGHT = "train", "weight"
"""Keys of a message that say whether it is learned; the second as in OpenAI's format. Templates do not see them."""
USER = "user"


class Conversation(NamedTuple):
    """Messages as a chat template reads them."""

    messages: Sequence[Mapping[str, Any]]
    learned: Sequence[bool] | None
    """Whether each message is learned; None: all of the assistant's."""


def read_conversation(value: Any, field: str, learn: Learn = "all") -> Conversation:
    """Returns the conversation that a field holds.

    Args:
        value: the field's value.
        field: its name, for errors.
        learn: whether all turns of the assistant are learned or only the last one, where messages do not say.

    Raises:
        JobError: the value is not a list of messages, or a message has a `train` or `weight` without a meaning.
    """
    messages, flags = _with_flags(value, field)
    if learn == "all" and all(flag is None for flag in flags):
        return Conversation(messages, None)
    return Conversation(messages, _decided(flags, _last_turn(messages) if learn == "last" else _answers(messages)))


def join_conversations(prompt: Any, completion: Any, fields: tuple[str, str], learn: Learn = "all") -> Conversation:
    """Returns a prompt and a completion as one conversation; the assistant's messages of the prompt are not learned.

    Raises:
        JobError: as `read_conversation`.
    """
    asked, asked_flags = _with_flags(prompt, fields[0])
    answered, answered_flags = _with_flags(completion, fields[1])
    by_default = _last_turn(answered) if learn == "last" else _answers(answered)
    learned = _decided([*asked_flags, *answered_flags], [*[False] * len(asked), *by_default])
    return Conversation([*asked, *answered], learned)


def checked_messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Returns the messages of a conversation, without keys that Arrow added because other rows have them.

    Raises:
        JobError: the value is not a list of messages.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise JobError(f"{field!r} holds {type(value).__name__} {str(value)[:60]!r}, not a list of messages")
    messages = [without_none(message) for message in value]
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str) or not message.keys() - {"role", TRAIN, WEIGHT}:
            keys = ", ".join(map(repr, message)) or "nothing"
            raise JobError(f"message {number} of {field!r} has {keys}; a message has 'role' and 'content'")
    return messages


def checked_tools(value: Any, field: str) -> Tools:
    """Returns JSON schemas of tools, which may be JSON text; None if there are none.

    Raises:
        JobError: the value is not a list of JSON schemas.
    """
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise JobError(f"{field!r} is not JSON ({error})") from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise JobError(f"{field!r} holds {type(tools).__name__} {str(tools)[:60]!r}, not a list of JSON schemas")
    return [without_none(tool) for tool in tools]


def without_none(value: Any) -> Any:
    """Drop None entries recursively: Arrow adds them for keys that other rows have."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def _with_flags(value: Any, field: str) -> tuple[list[dict[str, Any]], list[bool | None]]:
    """Returns messages without `train` and `weight`, and what these say of each: None is nothing."""
    messages = checked_messages(value, field)
    flags = [_flag(message, f"message {number} of {field!r}") for number, message in enumerate(messages)]
    kept = [{key: item for key, item in message.items() if key not in (TRAIN, WEIGHT)} for message in messages]
    return kept, flags


def _flag(message: Mapping[str, Any], place: str) -> bool | None:
    train, weight = message.get(TRAIN), message.get(WEIGHT)
    if train is not None and not isinstance(train, bool):
        raise JobError(f"{place} has {TRAIN} = {train!r}; it is true or false, or left out")
    # Of type bool, 1 and 0 are equal to weights too
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        message_ = f"{place} has {WEIGHT} = {weight!r}; only 0 (not learned) and 1 have a meaning"
        raise JobError(f"{message_}: tokens are learned or not, so round it, or repeat the row")
    if None not in (train, weight) and train != bool(weight):
        raise JobError(f"{place} has {TRAIN} = {str(train).lower()} and {WEIGHT} = {weight}, which differ; keep one")
    # A weight of 1 is what messages have anyway: files that give a weight to every message do not learn the user's
    return False if weight == 0 else train


def _decided(flags: Sequence[bool | None], by_default: Sequence[bool]) -> list[bool]:
    return [default if flag is None else flag for flag, default in zip(flags, by_default, strict=True)]


def _answers(messages: Sequence[Mapping[str, Any]]) -> list[bool]:
    return [message["role"] == ASSISTANT for message in messages]


def _last_turn(messages: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Whether each message is the assistant's and of its last turn, in which tools may answer in between."""
    answers = _answers(messages)
    last = max((number for number, is_answer in enumerate(answers) if is_answer), default=-1)
    asked = max((number for number in range(last) if messages[number]["role"] == USER), default=-1)
    return [is_answer and number > asked for number, is_answer in enumerate(answers)]
