"""Documents in memory, for tests of packings, tokenizers, and code that reads packed batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen
from attrs.validators import ge

from forge_core.contracts.components import DatasetComponent
from forge_core.contracts.errors import JobError
from forge_kit.data.tokenizers import begin_of_text
from forge_testing.tiny import VOCABULARY

if TYPE_CHECKING:
    import numpy as np

    from forge_core.contracts.contexts import BuildContext

END = VOCABULARY - 1
"""End-of-text of `RandomDocuments`."""


class ListedDocuments:
    """Documents from lists of ids; see `forge_core.contracts.data.Documents`."""

    def __init__(
        self,
        documents: Sequence[Sequence[int]],
        end_of_text: int = END,
        learned: Sequence[Sequence[bool]] | None = None,
        held_out: ListedDocuments | None = None,
    ) -> None:
        """Hold documents in memory.

        Args:
            documents: ids without end-of-text, which is appended to each.
            end_of_text: id that ends a document.
            learned: whether each id counts as a label, shaped like `documents`; the end-of-text always does. None: all.
            held_out: documents for evaluation, if any.
        """
        import numpy as np

        self.end_of_text, self.held_out = end_of_text, held_out
        self.bytes_per_token: float | None = 1.0
        self._ids = np.array([id_ for ids in documents for id_ in (*ids, end_of_text)], dtype=np.int64)
        self._ends = np.cumsum([len(ids) + 1 for ids in documents], dtype=np.int64)
        masks = [mask for row in learned or () for mask in (*row, True)]
        self._learned = None if learned is None else np.array(masks, dtype=bool)

    def __len__(self) -> int:
        return len(self._ids)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop].copy()

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        return None if self._learned is None else self._learned[start:stop].copy()

    def where(self, start: int, stop: int) -> str:
        return f"tokens {start} to {stop - 1} of a list"

    def ends(self) -> np.ndarray:
        return self._ends


@frozen(kw_only=True)
class RandomDocuments(DatasetComponent):
    """Documents of random ids and lengths, the same for the same settings."""

    count: int = field(default=40, validator=ge(1))
    """Documents to train on."""
    longest: int = field(default=30, validator=ge(1))
    """Upper bound of the ids of a document, without its end-of-text."""
    held_out: int = field(default=5, validator=ge(0))
    """Number of held-out documents."""
    seed: int = 0
    """Seed of ids and lengths."""

    def build(self, context: BuildContext) -> ListedDocuments:
        import numpy as np

        generator = np.random.default_rng(self.seed)
        lengths = generator.integers(1, self.longest, self.count + self.held_out, endpoint=True)
        documents = [generator.integers(0, END, length).tolist() for length in lengths]
        held_out = ListedDocuments(documents[self.count :]) if self.held_out else None
        return ListedDocuments(documents[: self.count], held_out=held_out)


@frozen(kw_only=True)
class Sentences(DatasetComponent):
    """Sentences of a few words, encoded by the job's tokenizer, for tests of tokenizers. They use 17 characters."""

    count: int = field(default=60, validator=ge(1))
    """Sentences to train on."""
    held_out: int = field(default=6, validator=ge(0))
    """Number of held-out sentences."""

    def documents(self) -> list[str]:
        return [sentence(number) for number in range(self.count)]

    def build(self, context: BuildContext) -> ListedDocuments:
        tokenizer = context.tokenizer
        if tokenizer is None:
            raise JobError("Sentences is text, and the job has no tokenizer; give it a table [data.tokenizer]")
        held = [sentence(number) for number in range(self.count, self.count + self.held_out)]

        def encoded(texts: Iterable[str]) -> list[list[int]]:
            return [[*begin_of_text(tokenizer), *ids] for ids in tokenizer.encode_batch(list(texts))]

        held_out = ListedDocuments(encoded(held), tokenizer.end_of_text) if held else None
        return ListedDocuments(encoded(self.documents()), tokenizer.end_of_text, held_out=held_out)


WHO, WHAT, WHERE = ("a hen", "the fox", "one owl"), ("sits", "sings", "waits", "naps"), ("here", "at home", "on top")


def sentence(number: int) -> str:
    """Returns a sentence such as `the fox sings here`."""
    return f"{WHO[number % 3]} {WHAT[number // 3 % 4]} {WHERE[number // 12 % 3]}"
