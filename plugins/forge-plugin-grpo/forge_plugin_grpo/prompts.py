"""The dataset `prompts`: what completions are drawn for."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import DatasetComponent, FilePath
from forge_core.contracts.data import IGNORED_LABEL
from forge_core.contracts.errors import JobError, Problem

if TYPE_CHECKING:
    import numpy as np

    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset, Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_grpo.kinds import RewardComponent

Line = Mapping[str, Any]
SHOWN = 20
"""Lines that one error names."""


@frozen(kw_only=True)
class Prompts(DatasetComponent):
    """Prompts from a JSONL file, for losses that draw completions, such as `grpo`. A row of a batch is one prompt.

    A line has `prompt`, a text or a list of chat messages that the tokenizer's template writes, and whatever rewards
    read: an `answer`, for instance.
    """

    path: FilePath
    """A JSONL file."""
    held_out_every: int = field(default=0, validator=ge(0))
    """Hold out every n-th line, starting with the first; 0: none."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that there is a file, a tokenizer, and a loss that draws completions."""
        if not Path(self.path).is_file():
            yield Problem("path", f"the file {self.path!r} does not exist; give a JSONL file of prompts")
        if job.data.tokenizer is None:
            yield Problem("", 'prompts are texts; add [data.tokenizer], such as type = "auto"')
        # By an attribute: losses of other plugins may draw completions, too
        if not getattr(type(job.loss), "draws_completions", False):
            yield Problem(
                "", f'[loss] is {type(job.loss).__name__}, and prompts alone teach nothing; take type = "grpo"'
            )
        elif Path(self.path).is_file() and (fault := self._first_fault(job)):
            yield Problem("path", fault)
        if self.held_out_every == 1:
            yield Problem("held_out_every", "holds out all lines; take 0 (none) or at least 2")

    def _first_fault(self, job: Job) -> str:
        """What is wrong with the first line; the others are read when the data are built."""
        rewards: Mapping[str, RewardComponent] = getattr(job.loss, "rewards", {})
        # Only \n ends a line, as in `read_lines`: the numbers in errors must agree
        with Path(self.path).open(encoding="utf-8-sig", newline="\n") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    fault = _fault(text)
                    faults = (
                        [fault] if fault else [_unread(name, one, json.loads(text)) for name, one in rewards.items()]
                    )
                    return next((f"{self.path}, line {number}: {one}" for one in faults if one), "")
        return ""

    def documents(self) -> Iterator[str]:
        """Yields all texts of the training lines, for a tokenizer to be trained on."""
        for line in self.lines():
            prompt = line["prompt"]
            yield prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
            yield from (value for key, value in line.items() if key != "prompt" and isinstance(value, str))

    def lines(self, held_out: bool = False) -> Sequence[Line]:
        """Returns the lines to train on, or those held out, in order: row n of the dataset is of line n.

        Raises:
            JobError: lines are malformed; each is named.
        """
        return [line for _, line in self._numbered(held_out)]

    def _numbered(self, held_out: bool) -> Sequence[tuple[int, Line]]:
        """The lines of one part, each with its number in the file."""
        every = self.held_out_every
        lines = read_lines(self.path, Path(self.path).stat().st_mtime_ns)
        return [line for place, line in enumerate(lines) if (bool(every) and place % every == 0) is held_out]

    def build(self, context: BuildContext) -> Dataset:
        """Returns the prompts, as the losses that draw completions expect them.

        Raises:
            JobError: a line is malformed, lacks what a reward reads, or leaves no room for completions, or no line is
                left to train on; each is named.
        """
        assert context.tokenizer is not None
        loss: Any = context.job.loss
        length = context.job.train.seq_len
        room = length // loss.group - loss.max_tokens + 1  # the last token of a completion is a label only
        found: list[tuple[int, Problem]] = []
        parts: dict[bool, list[list[int]]] = {}
        for held_out in (True, False):
            parts[held_out] = []
            for number, line in self._numbered(held_out):
                ids, fault = _encoded(context.tokenizer, line, room)
                faults = [fault, *(_unread(name, reward, line) for name, reward in loss.rewards.items())]
                found += [(number, Problem("path", f"{self.path}, line {number}: {one}")) for one in faults if one]
                parts[held_out].append(ids)
        problems = [problem for _, problem in sorted(found, key=lambda one: one[0])]
        if not parts[False]:
            problems.append(Problem("held_out_every", f"holds out every line of {self.path}; none is left to train on"))
        _refuse(self.path, problems)
        # Those held out are for the evaluation `rewards`, which reads the lines: without labels, they have no loss
        return PromptRows(parts[False], length, context.tokenizer.end_of_text)


@functools.lru_cache(maxsize=8)
def read_lines(path: str, _changed: int) -> Sequence[tuple[int, Line]]:
    """Read and check all lines of a file, each with its number; empty ones are left out.

    `_changed`, the time of the file's last change, is there for the cache.

    Raises:
        JobError: lines are malformed; each is named.
    """
    lines, problems = [], []
    # Not `splitlines`, which also divides at characters that JSON may have inside of a string, such as U+2028
    for number, text in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), 1):
        if text.strip():
            fault = _fault(text)
            if fault:
                problems.append(Problem("path", f"{path}, line {number}: {fault}"))
            else:
                lines.append((number, json.loads(text)))
    if not lines and not problems:
        problems = [Problem("path", f"{path} has no line; write a JSON object with a prompt in each")]
    _refuse(path, problems)
    return lines


def _refuse(path: str, problems: Sequence[Problem]) -> None:
    if problems:
        more = [Problem("path", f"… and {len(problems) - SHOWN} more of {path}")] if len(problems) > SHOWN else []
        raise JobError([*problems[:SHOWN], *more])


def _encoded(tokenizer: Tokenizer, line: Line, room: int) -> tuple[list[int], str]:
    """The ids of a line's prompt, and their faults."""
    try:
        ids = encode_prompt(tokenizer, line["prompt"])
    except JobError as error:
        return [], str(error)
    if len(ids) <= room:
        return ids, ""
    left = f"train.seq_len / loss.group - loss.max_tokens + 1 leaves {room}"
    return ids, f"its prompt has {len(ids)} tokens, and {left}; raise train.seq_len, or shorten the prompt"


def _unread(name: str, reward: RewardComponent, line: Line) -> str:
    fault = reward.row_fault(line)
    return fault and f"loss.rewards.{name} cannot score its completions: {fault}"


def _fault(text: str) -> str:
    try:
        line = json.loads(text)
    except ValueError as error:
        return f"is no JSON ({error})"
    if not isinstance(line, dict) or "prompt" not in line:
        return f"{text[:60]!r} has no key 'prompt'"
    prompt = line["prompt"]
    is_chat = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
    if not prompt or not (isinstance(prompt, str) or is_chat):
        return f"its prompt is {prompt!r:.60}; a prompt is a text, or a list of messages with 'role' and 'content'"
    return ""


def encode_prompt(tokenizer: Tokenizer, prompt: str | list[dict[str, Any]]) -> list[int]:
    """Returns the ids of a prompt; of a chat, to where the answer begins."""
    from forge_plugin_generate.prompts import chat_ids, prompt_ids

    return list(prompt_ids(tokenizer, prompt) if isinstance(prompt, str) else chat_ids(tokenizer, prompt))


@frozen
class PromptRows:
    """See `forge_core.contracts.data.Dataset`. A row has its prompt at the start, and no labels."""

    prompts: Sequence[Sequence[int]]
    length: int
    padding: int
    held_out: Any = None
    bytes_per_token: float | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        import numpy as np  # late: jobs are checked, and schemas made, without it

        prompt = self.prompts[index]
        ids = np.full(self.length, self.padding, dtype=np.int64)
        ids[: len(prompt)] = prompt
        labels = np.full(self.length, IGNORED_LABEL, dtype=np.int64)
        return {"input_ids": ids, "labels": labels, "prompt_tokens": np.array(len(prompt))}
