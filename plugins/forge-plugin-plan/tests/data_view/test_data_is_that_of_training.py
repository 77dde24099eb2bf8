"""The samples that `forge-run data` shows are those that a run trains on, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core import Trainer, load_job
from forge_testing.refusals import lacks

PACKED = '[data.packing]\ntype = "forge-run/concatenate"\n'


@pytest.mark.parametrize(("source", "seq_len"), [("Chats", 8), ("Talk", 6)])
def test_sample_n_of_step_s_is_the_one_that_training_reads(source, seq_len, write_job, as_json, batches) -> None:
    job = write_job(source, PACKED, seq_len=seq_len)
    Trainer(load_job(job), hooks=[batches], echo=lambda text: None).run()
    for step in (1, 4, 6):
        shown = as_json(job, f"--step={step}", *(f"--sample={n}" for n in range(4)))["samples"]
        assert len(shown) == 4
        for sample, (inputs, labels) in zip(shown, batches.steps[step - 1], strict=True):
            ids = [id_ for run in sample["runs"] for id_ in run["ids"]]
            assert ids[:seq_len] == inputs
            assert ids[seq_len:] == [label for label in labels[-1:] if label >= 0]
            assert sample["learned"] == sum(label >= 0 for label in labels)


def test_the_tokenizer_that_the_run_keeps_is_taken(here: Path, write_job, data) -> None:
    job = write_job("Chats", seq_len=8)
    Trainer(load_job(job), echo=lambda text: None).run()
    parts = here / "parts.py"
    kept = "    def load(self, context, folder):\n        raise JobError(f'kept in {folder}')\n"
    imports = "from forge_core.contracts.errors import JobError\n"
    parts.write_text(
        parts.read_text().replace("    load = build\n", kept).replace("import hashlib\n", f"import hashlib\n{imports}")
    )
    code, _, err = data(job)
    assert code == 2
    assert "kept in runs/run/tokenizer" in err


def test_no_run_folder_is_made(here: Path, write_job: Callable[..., str], data) -> None:
    assert data(write_job("Chats", seq_len=8))[0] == 0
    assert {path.name for path in here.iterdir()} <= {"parts.py", "job.toml", "cache", "__pycache__"}


def test_a_step_or_a_sample_that_the_run_does_not_have_is_refused(write_job, data) -> None:
    code, out, err = data(write_job("Chats", seq_len=8), "--step=7", "--sample=4")
    assert (code, out) == (2, "")
    assert not lacks(err, "--step 7", "train.steps is 6", "1 to 6")
    assert not lacks(err, "--sample 4", "step 7 has 4 samples", "0 to 3")


def test_a_job_for_several_ranks_shows_the_same_samples(write_job, as_json) -> None:
    job = write_job("Chats", "[parallel.replicate]\n", seq_len=8)
    two = as_json(job, "--step=3", "--world-size=2")
    write_job("Chats", seq_len=8)
    assert two == as_json(job, "--step=3")
