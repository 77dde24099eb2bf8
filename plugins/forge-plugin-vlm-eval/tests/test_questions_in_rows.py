"""What is asked in the rows of a dataset."""

from __future__ import annotations

import numpy as np
import pytest

from forge_core.contracts.errors import DataError
from forge_plugin_vision import GRIDS, PATCHES, SECONDS, VIDEO, Grid, Joint, VisionLanguage
from forge_plugin_vlm_eval.questions import images_of, questions_of
from forge_testing.refusals import naming
from forge_testing.vision import tiny_language, tiny_vision

SEEN = VisionLanguage(language=tiny_language(), vision=tiny_vision(), fusion=Joint()).image_input()
"""Sees an image of 2 x 2 patches at four positions."""
NO, IMAGE = -100, [-1] * 4


def row_of(ids, labels, grids=((1, 2, 2), (1, 2, 2)), **entries):
    count = sum(frames * rows * columns for frames, rows, columns in grids)
    patches = np.arange(1, count + 3, dtype=np.uint8)[:, None] * (np.arange(count + 2) < count)[:, None]
    entry = np.array([*grids, (0, 0, 0)])
    seconds = np.arange(1.0, len(entry) + 1, dtype=np.float32)
    return {
        "input_ids": np.array(ids, np.int32),
        "labels": np.array(labels),
        PATCHES: patches,
        GRIDS: entry,
        SECONDS: seconds,
        **{name: np.array(values) for name, values in entries.items()},
    }


def test_each_answer_is_asked_with_what_is_before_it_and_with_the_images_up_to_there():
    ids = [9, *IMAGE, 3, 4, 5, *IMAGE, 6, 7, 8]
    row = row_of(ids, [NO] * 5 + [4, 5, NO, NO, NO, NO, 6, NO, 8, NO])
    first, second, third = questions_of(row, SEEN)
    assert first.prompt.tolist() == ids[:6]
    assert (first.answer.tolist(), second.answer.tolist(), third.answer.tolist()) == ([4, 5], [6], [8])
    assert second.prompt.tolist() == ids[:12]  # the image's last position predicts the answer
    assert third.prompt.tolist() == ids[:14]
    assert first.entries(row)[GRIDS].tolist() == [[1, 2, 2], [0, 0, 0], [0, 0, 0]]
    assert first.entries(row)[PATCHES][:, 0].tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 0, 0]
    assert first.entries(row)[SECONDS].tolist() == [1, 0, 0]
    assert third.entries(row)[PATCHES].tolist() == row[PATCHES].tolist()


def test_an_image_in_joined_tiles_has_its_patches():
    tiles = Grid.of_tiles(1, 2, (4, 8))
    patches = np.concatenate([np.full((tiles.patches, 3), 7), np.full((4, 3), 9)])
    row = {PATCHES: patches, GRIDS: np.array([tiles, (1, 2, 2)])}
    assert (images_of(row, 0, 1)[PATCHES][:, 0] == [7] * 48 + [0] * 4).all()
    assert (images_of(row, 1, 2)[PATCHES][:, 0] == [9] * 4 + [0] * 48).all()


def test_documents_of_a_packed_row_have_their_own_images():
    ids = [*IMAGE, 3, *IMAGE, 5, 6, 0]
    labels = [NO, NO, NO, 3, NO, NO, NO, NO, NO, 6, NO, NO]
    row = row_of(ids, labels, document_ids=[0] * 5 + [1] * 6 + [2])
    first, second = questions_of(row, SEEN)
    assert (first.document, second.document) == (0, 1)
    assert second.prompt.tolist() == [*IMAGE, 5]
    assert second.entries(row)[PATCHES][:, 0].tolist() == [5, 6, 7, 8, 0, 0, 0, 0, 0, 0]
    assert second.entries(row)[SECONDS].tolist() == [2, 0, 0]


def test_a_clip_with_texts_between_its_frames_is_whole():
    row = row_of([7, *[VIDEO] * 4, 8, *[VIDEO] * 4, 9], [NO] * 10 + [5], grids=[(2, 2, 2)])
    [question] = questions_of(row, SEEN)
    assert question.images == (0, 1)


def test_texts_before_any_image_and_rows_without_images_ask_nothing():
    assert not list(questions_of(row_of([2, 3, *IMAGE, *IMAGE], [3, *[NO] * 9]), SEEN))
    assert not list(questions_of(row_of([2, 3], [3, 4], grids=[]), SEEN))
    assert not list(questions_of({"input_ids": np.array([2]), "labels": np.array([3])}, SEEN))


def test_positions_that_belong_to_no_image_are_refused():
    with pytest.raises(DataError, match=naming(8, 4)):
        list(questions_of(row_of([*IMAGE, 2], [NO, NO, NO, 2, 3]), SEEN))
