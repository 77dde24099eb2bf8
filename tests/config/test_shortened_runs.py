"""`--train.steps=20` over a job whose warm-up, decay or phases need more steps."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core import JobError, load_job

JOB = {
    "train": {"steps": 100, "global_batch_size": 4, "seq_len": 16},
    "model": {"type": "forge_testing:TinyModel"},
    "optimizer": {"type": "adamw"},
    "scheduler": {"type": "wsd", "warmup_steps": 30, "decay_fraction": 0.2},
    "data": {
        "sources": [{"type": "forge_testing:Numbers"}],
        "phases": [{"start_step": 10, "lr_factor": 0.5}, {"start_step": 50}, {"start_step": 60}],
    },
}


def shorten(steps: int, **scheduler: Any) -> Any:
    table = JOB | ({"scheduler": scheduler} if scheduler else {})
    return load_job(table, overrides={"train.steps": steps}, world_size=1)


def test_a_later_layer_that_shortens_a_run_clips_what_no_longer_fits() -> None:
    with pytest.warns(UserWarning, match=r"clipped|left out") as caught:
        job = shorten(20)
    assert (job.scheduler.warmup_steps, job.scheduler.decay_fraction) == (16, 0.2)
    assert [phase.start_step for phase in job.data.phases] == [10]
    text = "\n".join(str(warning.message) for warning in caught)
    for change in (
        "warmup_steps: clipped to 16 (train.steps): 30 is",
        "phases.1.start_step: left",
        "phases.2.start_step: left",
    ):
        assert change in text


@pytest.mark.filterwarnings("ignore:.*(clipped|left out)")
@pytest.mark.parametrize("steps", [1, 2, 7, 20, 40])
@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "wsd", "warmup_steps": 30, "decay_steps": 60},
        {"type": "wsd", "warmup_steps": 20, "decay_steps": 60},
        {"type": "wsd", "warmup_steps": 38},
        {"type": "cosine", "warmup_steps": 30, "decay_steps": 60},
        {"type": "constant", "warmup_steps": 30},
    ],
)
def test_every_shorter_run_has_a_schedule(scheduler: dict[str, Any], steps: int) -> None:
    assert shorten(steps, **scheduler).train.steps == steps


def test_what_a_file_or_a_command_line_says_in_itself_is_a_mistake() -> None:
    with pytest.raises(JobError) as in_file:
        load_job(JOB | {"train": JOB["train"] | {"steps": 20}}, world_size=1)
    with pytest.raises(JobError) as in_flags:
        load_job(JOB, overrides=["scheduler.warmup_steps=80", "train.steps=70"], world_size=1)
    assert [problem.path for problem in in_flags.value.problems] == ["scheduler.warmup_steps"]
    phases = ["data.phases.1.start_step", "data.phases.2.start_step"]
    assert [problem.path for problem in in_file.value.problems] == [*phases, "scheduler.warmup_steps"]
