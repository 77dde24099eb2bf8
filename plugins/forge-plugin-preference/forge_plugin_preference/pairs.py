"""The dataset `pairs`: prompts with a chosen and a rejected answer, or with one answer and a label."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
from attrs import Attribute, field, frozen
from attrs.validators import ge

from forge_core.contracts.components import DatasetComponent, FilePath
from forge_core.contracts.errors import JobError, Problem
from forge_kit.tools.rank_zero import is_checked_elsewhere
from forge_plugin_preference.answers import LOSSES
from forge_plugin_preference.lines import Malformed, Preference, numbered_lines, parse, read_preferences, texts_of

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.data import Dataset, Tokenizer
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job
    from forge_plugin_preference.encoding import Document
    from forge_plugin_preference.rows import Example, Rows


def _off_or_at_least_two(_: Any, attribute: Attribute, value: int) -> None:
    if value < 0 or value == 1:
        raise ValueError(f"{attribute.name!r} must be 0 (off) or at least 2, not {value}")


@frozen(kw_only=True)
class Pairs(DatasetComponent):
    """Answers by preference, from a JSONL file, for losses such as `dpo`; only answers are learned.

    A line has `prompt`, `chosen` and `rejected`, or for `kto` `prompt`, `completion` and `label`. Each is a text, or a
    list of chat messages that the tokenizer's template writes; then `prompt` may be left out of whole conversations.
    Other keys are ignored. Documents in a row do not see each other.
    """

    gives_answers: ClassVar[bool] = True
    """Informs preference losses that rows have the entries of `forge_plugin_preference.answers`."""

    path: FilePath
    """A JSONL file."""
    held_out_every: int = field(default=0, validator=_off_or_at_least_two)
    """Hold out every n-th line, starting with the first. 0: none."""
    packed: bool = True
    """Whether a row has as many examples as fit. False: one, which takes more time and changes no result."""
    row_examples: int = field(default=32, validator=ge(1))
    """Examples of a packed row at most; sources of one job agree on it."""
    too_long: Literal["drop", "truncate", "error"] = "error"
    """What is done with an example, a pair for instance, whose documents together are longer than `train.seq_len`: drop
    it; truncate the start of its prompt, alike for all of its answers, and drop it if that is not enough; or end with
    an error that names the line. The run's summary has the counts."""
    unpair: bool = False
    """Whether each answer of a pair is an example of its own, desirable if chosen: for `kto`."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks the keys, the first line, and that the loss learns from answers."""
        if job.data.tokenizer is None:
            yield Problem("", 'answers are texts; add [data.tokenizer], such as type = "auto"')
        if not getattr(type(job.loss), "reads_answers", False):
            message = f"[loss] is {type(job.loss).__name__}, which would learn rejected answers like chosen ones"
            yield Problem("", f"{message}; take type = {LOSSES}")
        yield from self._agreement(job)
        if is_checked_elsewhere():
            return
        if not Path(self.path).is_file():
            yield Problem("path", f"{self.path!r} does not exist; give a JSONL file of preferences")
            return
        try:
            # The first line alone: all are read when the data are built
            number, text = next(numbered_lines(self.path), (0, ""))
            first = _parsed(text, number, job) if number else None
        except JobError as error:
            yield from error.problems
        except Malformed as error:
            yield Problem("path", f"{self.path}, line {number}: {error}")
        else:
            yield from [Problem("path", f"{self.path} is empty")] if first is None else self._fitting(first, job)

    def _agreement(self, job: Job) -> Iterator[Problem]:
        """Rows of several sources are stacked, and have the same entries only if these keys agree."""
        for number, other in enumerate(job.data.sources):
            if isinstance(other, Pairs) and other._row_places() != self._row_places():
                message = f"rows have {self.row_examples if self.packed else 1} places for examples, those of"
                yield Problem(
                    "row_examples" if self.packed else "packed",
                    f"{message} data.sources.{number} {other.row_examples if other.packed else 1}; make them agree",
                )
                return

    def _fitting(self, first: Preference, job: Job) -> Iterator[Problem]:
        """Problems of the loss and the tokenizer with such lines."""
        tokenizer = job.data.tokenizer
        if first.is_chat and tokenizer is not None and not getattr(type(tokenizer), "chats", False):
            message = f"{self.path} has chat messages, and {type(tokenizer).__name__} has no chat template"
            yield Problem("path", f'{message}; set [data.tokenizer] type = "auto"')
        if mismatch := self._mismatch(len(first.answers), job):
            yield Problem(*mismatch)
        if self.too_long == "truncate" and _needs_stored(job):
            message = "the log-probabilities in the data are of answers to whole prompts"
            yield Problem("too_long", f'{message}; set "drop" or "error", or give loss.reference')

    def _mismatch(self, answers: int, job: Job) -> tuple[str, str] | None:
        """(key, message) if the loss does not learn from lines with so many answers."""
        paired, name = getattr(type(job.loss), "paired", None), type(job.loss).__name__
        if answers == 1 and self.unpair:
            return "unpair", f"{self.path} has single answers already; leave it out"
        if paired and (answers == 1 or self.unpair):
            what = "makes pairs single answers" if self.unpair else f"{self.path} has single answers with a label"
            key = "unpair" if self.unpair else "path"
            return key, f'{what}, and {name} compares two; take [loss] type = "kto", or pairs'
        if paired is False and answers == 2 and not self.unpair:
            return "path", f"{self.path} has pairs, and {name} learns from single answers; set unpair = true"
        return None

    def documents(self) -> Iterator[str]:
        """Yields the texts that are not held out."""
        return texts_of(self._split(read_preferences(self.path))[0])

    def build(self, context: BuildContext) -> Dataset:
        """Reads and tokenises the whole file.

        Raises:
            JobError: lines are malformed or do not fit, or the loss does not learn from such lines.
        """
        from forge_plugin_preference.encoding import encode

        job, tokenizer = context.job, context.tokenizer
        if tokenizer is None:
            raise JobError([Problem("", "answers are texts; add [data.tokenizer]")])
        stored, margins = _needs_stored(job), _needs_margins(job)
        preferences = read_preferences(self.path, with_reference=stored, with_margin=margins)
        if preferences and (mismatch := self._mismatch(len(preferences[0].answers), job)):
            raise JobError([Problem(*mismatch)])
        parts = []
        for part in self._split(preferences):
            pairs = zip(part, encode(part, tokenizer, self.path), strict=True)
            examples = [_example(line, documents) for line, documents in pairs]
            parts.append(_unpaired(examples) if self.unpair else examples)
        digest = _digest(self.path)
        training, held_out = (self._rows(part, tokenizer, job, digest) if part else None for part in parts)
        if training is None:
            raise JobError([Problem("path", f"{self.path} has no line to train on; give more, or hold out fewer")])
        return attrs.evolve(training, held_out=held_out)

    def _rows(self, examples: list[Example], tokenizer: Tokenizer, job: Job, digest: str) -> Rows | None:
        from forge_kit.data.tokenizers import begin_of_text
        from forge_plugin_preference.rows import Rows, fit, pack, with_mismatched

        length = job.train.seq_len
        fitted = fit(examples, length, self.too_long, len(begin_of_text(tokenizer)), self.path)
        if not fitted.examples:
            message = f"no line of {self.path} fits into a row of train.seq_len = {length} tokens"
            raise JobError([Problem("path", f"{message}; raise it")])
        # After `fit`, so that examples it dropped lend no answers
        if getattr(job.loss, "wants_mismatched", False):
            fitted.examples = with_mismatched(fitted.examples, length)
        rows = pack(fitted.examples, length, self._row_places()[0])
        return Rows(rows, length, self._row_places()[1], tokenizer.end_of_text, digest, self.path, fitted.counts)

    def _row_places(self) -> tuple[int, int]:
        """Examples of a row at most, and ids of documents: two for each, and the one of the padding."""
        most = self.row_examples if self.packed else 1
        return most, 2 * most + 1

    def _split(self, lines: list[Preference]) -> tuple[list[Preference], list[Preference]]:
        """The lines to train on, and those held out."""
        every = self.held_out_every
        held_out = lines[::every] if every else []
        return [line for place, line in enumerate(lines) if not every or place % every], held_out


def _parsed(text: str, number: int, job: Job) -> Preference:
    return parse(text, number, with_reference=_needs_stored(job), with_margin=_needs_margins(job))


def _needs_stored(job: Job) -> bool:
    """Whether the loss takes log-probabilities under the reference from the data."""
    return bool(getattr(job.loss, "uses_reference", False)) and not getattr(job.loss, "reference", "")


def _needs_margins(job: Job) -> bool:
    """Whether the loss takes from the data by how much a chosen answer is better."""
    return bool(getattr(job.loss, "margins", False))


def _example(line: Preference, documents: tuple[Document, ...]) -> Example:
    from forge_plugin_preference.rows import Example

    return Example(line.number, documents, line.desirable, line.reference, margin=line.margin)


def _unpaired(examples: list[Example]) -> list[Example]:
    from forge_plugin_preference.rows import Example

    # Reference log-probabilities are there for every answer, or for none
    return [
        Example(each.line, (document,), (desirable,), each.reference[place : place + 1])
        for each in examples
        for place, (document, desirable) in enumerate(zip(each.documents, each.desirable, strict=True))
    ]


def _digest(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
