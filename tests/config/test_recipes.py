"""The job files of `configs/` are jobs, whether or not their data and models are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core import load_job

ROOT = Path(__file__).parents[2]
LAYERS = {
    "inside": ("quickstart", "inside"),
    "deepseek-v3-64gpu": ("deepseek-v3-1024gpu", "deepseek-v3-64gpu"),
    **{f"vlm-{size}": (f"vlm-{size}", "vlm-stages") for size in ("0.5b", "2b", "8b")},
}
"""Files that go with others."""
PARTS = ("continue-smollm2", "vlm-stages")
"""Files that need a model: that of an import, or of the files above."""
NAMES = sorted({path.stem for path in (ROOT / "configs").glob("*.toml")} - {*PARTS})
RANKS = {"8b": 8, "2b": 8}


@pytest.mark.parametrize("name", NAMES)
def test_it_passes_the_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where their first lines start them
    ranks = next((int(part.removesuffix("gpu")) for part in name.split("-") if part.endswith("gpu")), 1)
    files = [f"configs/{file}.toml" for file in LAYERS.get(name, (name,))]
    job = load_job(*files, world_size=RANKS.get(name.removeprefix("vlm-"), ranks), with_data=False)
    assert job.train.steps > 0


@pytest.mark.parametrize("size", ["0.5b", "2b", "8b"])
def test_stages_and_mixtures_change_at_the_same_steps(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = load_job(f"configs/vlm-{size}.toml", "configs/vlm-stages.toml", world_size=1, with_data=False)
    stages = job.plugins["freeze"].stages
    ends = [sum(stage.steps for stage in stages[: number + 1]) for number in range(len(stages) - 1)]
    assert [phase.start_step for phase in job.data.phases] == ends == [2000, 10_000]
    assert {name for phase in job.data.phases for name in phase.weights} == {s.name for s in job.data.sources}
