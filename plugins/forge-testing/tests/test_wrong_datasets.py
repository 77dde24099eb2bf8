"""What the suite of datasets says of wrong ones."""

from __future__ import annotations

import itertools
import os
from itertools import count

import numpy as np
import pytest
from attrs import frozen

from forge_core.contracts.components import DatasetComponent
from forge_kit.data.document_streams import StreamedDocument, packed
from forge_testing import ListedDocuments
from forge_testing.suites import DatasetSuite
from forge_testing.tiny import NumberSequences

pytestmark = pytest.mark.thorough

SEQ_LEN = 8
HELD_OUT = NumberSequences(4, SEQ_LEN, 1, 50)


def component_of(make):
    """`make()` gives what it builds."""

    @frozen(kw_only=True)
    class Wrong(DatasetComponent):
        def build(self, context):
            made = make()
            return packed(made, context) if isinstance(made, Lanes) else made

    return Wrong()


class Sequences:
    """Counting upwards, which is right; subclasses alter it."""

    held_out, bytes_per_token = HELD_OUT, None

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return dict(NumberSequences(32, SEQ_LEN, 2, 0)[index])


class Shifted(Sequences):
    shifts = count()

    def __init__(self):
        self.shift = next(self.shifts)

    def __getitem__(self, index):
        return super().__getitem__((index + self.shift) % 32)


class Growing(Sequences):
    sizes = count(32)

    def __init__(self):
        self.size = next(self.sizes)

    def __len__(self):
        return self.size


class Shared(Sequences):
    def __init__(self):
        self.samples = [super(Shared, self).__getitem__(index) for index in range(32)]

    def __getitem__(self, index):
        return self.samples[index]


class Unshifted(Sequences):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "labels": sample["input_ids"]}


class Short(Sequences):
    def __getitem__(self, index):
        return {name: value[:-1] for name, value in super().__getitem__(index).items()}


class Unlabelled(Sequences):
    def __getitem__(self, index):
        return {"input_ids": super().__getitem__(index)["input_ids"]}


class Floats(Sequences):
    def __getitem__(self, index):
        return {name: value.astype(np.float32) for name, value in super().__getitem__(index).items()}


class Negative(Sequences):
    def __getitem__(self, index):
        return {name: value - 1000 for name, value in super().__getitem__(index).items()}


class AnotherHeldOut(Sequences):
    starts = itertools.count(1)

    def __init__(self):
        self.held_out = NumberSequences(4, SEQ_LEN, 1, next(self.starts))


class HeldOutFromTraining(Sequences):
    """Holds out what it trains on."""

    held_out = NumberSequences(8, SEQ_LEN, 1, 4)


class OfTheProcess(Sequences):
    parent = os.getpid()

    def __getitem__(self, index):
        return super().__getitem__(index if os.getpid() == self.parent else (index + 1) % 32)


class NoEnds(ListedDocuments):
    def ends(self):
        return super().ends()[:-1]


class NoEndOfText(ListedDocuments):
    def ends(self):
        ends = super().ends().copy()
        ends[:-1] -= 1
        return ends


class Views(ListedDocuments):
    def tokens(self, start, stop):
        return self._ids[start:stop]


class Overlapping(ListedDocuments):
    def tokens(self, start, stop):
        return super().tokens(max(0, start - 1), stop)


class Lanes:
    """Documents of three tokens, each lane's by number, which is right; subclasses alter it."""

    held_out, bytes_per_token, end_of_text, lanes = None, None, 31, 2

    def read(self, lane, position):
        for number in count(position["next"] if position else 0):
            yield self.document(lane, number)

    def document(self, lane, number):
        tokens = np.array([lane, number % 30, 31])
        return StreamedDocument(tokens, None, {"next": number})


class OneForAll(Lanes):
    """All lanes take their documents from one row."""

    def __init__(self):
        self.numbers = count()

    def read(self, lane, position):
        while True:
            yield self.document(lane, next(self.numbers))


class NextPosition(Lanes):
    """Positions after a document instead of before it."""

    def document(self, lane, number):
        return super().document(lane, number)._replace(position={"next": number + 1})


class OddPosition(Lanes):
    def document(self, lane, number):
        return super().document(lane, number)._replace(position={"next": np.int64(number)})


def listed(cls):
    documents = [[(start + step) % 30 for step in range(12)] for start in range(12)]
    return component_of(lambda: cls(documents, 31))


SAME, LABELS = "test_building_it_again_gives_the_same", "test_labels_are_shifted_and_of_the_length_of_the_job"
DOCUMENTS, LANES = "test_documents_are_one_row_of_tokens", "test_lanes_of_a_stream_are_independent"
CONTINUED = "test_a_run_that_continues_gets_the_sequences_that_come_next"


@pytest.mark.parametrize(
    ("check", "component", "told"),
    [
        (SAME, component_of(Shifted), "its sequence 0 differs: ["),
        (SAME, component_of(Growing), "built twice, it has 32 and 33 sequences"),
        ("test_reading_a_sequence_changes_nothing", component_of(Shared), "is now [0, 0, 0, 0, 0, 0, 0, 0], after"),
        (LABELS, component_of(Unshifted), "the label of position 0 is 0, and the next token is 1; labels[t] must be"),
        (LABELS, component_of(Short), "input_ids of sequence 0 have the shape (7,), not (8,)"),
        (LABELS, component_of(Unlabelled), "sequence 0 has no labels"),
        (LABELS, component_of(Floats), "input_ids of sequence 0 are float32; they must be integers"),
        (LABELS, component_of(Negative), "input_ids of sequence 0 have the id -1000; allowed is 0 or more"),
        ("test_what_is_held_out_is_fixed", component_of(AnotherHeldOut), "built twice, held-out sequence 0 differs"),
        (
            "test_what_is_held_out_is_not_trained_on",
            component_of(HeldOutFromTraining),
            "all of the first 8 held-out sequences are trained on too; hold out sequences that training never reads",
        ),
        ("test_workers_change_nothing", component_of(OfTheProcess), "with data.workers = 2, the run gets other `input"),
        (CONTINUED, component_of(NextPosition), "a run that continues after step 3 gets other `input_ids` in step 4"),
        (CONTINUED, component_of(OddPosition), "is not plain JSON"),
        (DOCUMENTS, listed(NoEnds), "ends() must ascend to T = 156, and is [13 26 39 52] … [143]"),
        (DOCUMENTS, listed(NoEndOfText), "document 0 does not end with end_of_text"),
        (DOCUMENTS, listed(Views), "tokens returns no copy: writing shows"),
        (DOCUMENTS, listed(Overlapping), "two slices together differ from one slice over both"),
        (LANES, component_of(OneForAll), "another sequence"),
        (LANES, component_of(NextPosition), "does not return the next one"),
    ],
)
def test_what_is_wrong_is_told(refusal, check, component, told):
    assert told in refusal(DatasetSuite, check, component)
