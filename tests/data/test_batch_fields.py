"""Entries of batches that a model asks for besides tokens, from sources that have them and from those that have not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forge_core import Trainer, load_job
from forge_core.contracts.data import BatchField
from forge_core.contracts.errors import DataError
from forge_core.data.loader import TrainLoader, evaluation_batches
from forge_core.data.reading import collate
from forge_testing import Numbers, PatchModel, PatchNumbers
from forge_testing.refusals import lacks, naming

SOURCES = (PatchNumbers(name="images"), Numbers(name="text"))

LOCAL_MODEL = """
from attrs import frozen
from forge_core.contracts.data import BatchField
from forge_testing import PatchModel

@frozen(kw_only=True)
class Seeing(PatchModel):
    def batch_fields(self, job):
        return {"patches": BatchField((self.patches, 4), "uint8")}
"""

JOB = """
[job]
output = "{folder}"
[train]
steps = 3
global_batch_size = 4
seq_len = 8
dry_run = "always"
[model]
type = "{folder}/seeing.py:Seeing"
[data]
workers = {workers}
[[data.sources]]
type = "forge_testing:Numbers"
[[data.sources]]
type = "forge_testing:PatchNumbers"
[optimizer]
type = "forge_testing:TinyAdamW"
"""


def token_row():
    return {"input_ids": np.arange(3), "labels": np.arange(3)}


# --- collating ---------------------------------------------------------------------------------------------------


FIELDS = {"pixels": BatchField((2,), "uint8")}


def test_a_row_without_an_entry_that_the_model_asks_for_has_zeros():
    rows = [token_row(), {**token_row(), "pixels": np.array([3, 4], np.uint8)}]
    for batch in (collate(rows, FIELDS), collate(rows[::-1], FIELDS)):
        assert batch["pixels"].dtype == torch.uint8
        assert sorted(batch["pixels"].tolist()) == [[0, 0], [3, 4]]
    assert collate(rows[:1], FIELDS)["pixels"].tolist() == [[0, 0]]


@pytest.mark.parametrize("pixels", [np.zeros(3, np.uint8), np.zeros(2, np.int64)])
@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_an_entry_of_another_form_than_the_model_asks_for_is_refused_by_name(pixels, order):
    rows = [token_row(), {**token_row(), "pixels": pixels}][order]
    number = len(rows) - 1 if order == slice(None) else 0
    expected = naming("'pixels'", f"{pixels.dtype} ({len(pixels)},)", f"row {number}", "uint8 (2,)")
    with pytest.raises(DataError, match=expected):
        collate(rows, FIELDS)


def test_other_entries_must_still_be_in_all_rows():
    with pytest.raises(DataError, match=naming("'weights'", "row 0", "float64 (2,)", "row 1")):
        collate([token_row(), {**token_row(), "weights": np.zeros(2)}], FIELDS)


def test_positions_may_be_asked_for_and_are_int64_in_whatever_width_they_are_stored():
    rows = [{**token_row(), "positions": np.array([0, 1, 0], np.int16)}, token_row()]
    assert collate(rows, {"positions": BatchField((3,), "int64")})["positions"].tolist() == [[0, 1, 0], [0, 0, 0]]


def test_a_dtype_that_numpy_and_torch_do_not_share_is_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        BatchField((2,), "bfloat16")


# --- as a user meets them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_model_in_a_local_file_trains_on_images_and_text(tmp_path, workers):
    (tmp_path / "seeing.py").write_text(LOCAL_MODEL)
    (tmp_path / "job.toml").write_text(JOB.format(folder=tmp_path, workers=workers))
    said = []
    summary = Trainer(load_job(tmp_path / "job.toml"), echo=said.append).run()
    assert summary.step == 3
    assert summary.evaluation["eval/tokens"] == 16 * 8
    assert any(line.startswith("dry run: ") and not lacks(line, "4 x 8") for line in said)


def test_training_rows_have_the_patches_of_their_source(make_job, build):
    job = make_job(model=PatchModel(), data={"sources": SOURCES})
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    [batch] = loader.next_step()
    loader.close()
    seen = batch["patches"].flatten(1).any(1)
    assert seen.tolist() == (batch["sources"] == 0).tolist()
    assert set(seen.tolist()) == {True, False}


def test_held_out_rows_have_the_patches_of_their_source(make_job, build):
    job = make_job(model=PatchModel(), data={"sources": SOURCES})
    run = build(job)
    batches = list(evaluation_batches(run.held_out, 0, job, run.context))
    assert torch.cat([b["patches"] for b in batches]).flatten(1).any(1).tolist() == [True] * 8 + [False] * 8


def test_text_alone_is_enough(make_job, train):
    assert train(make_job(model=PatchModel())).step == 4


def test_a_source_of_another_shape_names_itself(make_job, build):
    job = make_job(model=PatchModel(), data={"sources": (PatchNumbers(patches=5),)})
    run = build(job)
    loader = TrainLoader(job, run.datasets, run.context)
    with pytest.raises(DataError, match=naming("'patches'", "uint8 (5, 4)", "source '0'", "uint8 (6, 4)")):
        loader.next_step()
    loader.close()


def test_a_model_that_asks_for_nothing_takes_what_all_rows_have(make_job, train):
    assert train(make_job(data={"sources": (PatchNumbers(),)})).step == 4
