"""The job files of `configs/` are jobs, whether or not their data and models are there."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forge_core import Job, load_job

ROOT = Path(__file__).parents[2]
LAYERS = {
    "inside": ("quickstart", "inside"),
    "deepseek-v3-64gpu": ("deepseek-v3-1024gpu", "deepseek-v3-64gpu"),
    **{f"vlm-{size}": (f"vlm-{size}", "vlm-stages") for size in ("0.5b", "2b", "8b")},
}
"""Files that go with others."""
PARTS = ("continue-smollm2", "ladder", "vlm-stages")
"""Files that need a model: that of an import, or of the files above; and a ladder, which has a job."""
NAMES = sorted({path.stem for path in (ROOT / "configs").glob("*.toml")} - {*PARTS})
RANKS = {"8b": 8, "2b": 8}
REFERENCES = {"dpo": {"loss.reference": "configs"}, "sft": {"data.tokenizer": {"type": "bytes"}}}
"""What stands for the run of another file, to which a loss or a tokenizer refers."""


def load(name: str, monkeypatch: pytest.MonkeyPatch, overrides: Mapping[str, Any] | None = None) -> Job:
    monkeypatch.chdir(ROOT)  # where their first lines start them
    ranks = next((int(part.removesuffix("gpu")) for part in name.split("-") if part.endswith("gpu")), 1)
    files = [f"configs/{file}.toml" for file in LAYERS.get(name, (name,))]
    ranks = RANKS.get(name.removeprefix("vlm-"), ranks)
    overrides = {**REFERENCES.get(name, {}), **(overrides or {})}
    return load_job(*files, overrides=overrides, world_size=ranks, with_data=False)


@pytest.fixture
def without_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what `test_it_passes_the_check` compares with the model, which is the same however long a run is."""
    monkeypatch.setattr("forge_core.parallel.initialise.fitting_problems", lambda job, layout, catalog: [])


@pytest.mark.parametrize("name", NAMES)
def test_it_passes_the_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(name, monkeypatch).train.steps > 0


@pytest.mark.parametrize("path", sorted((ROOT / "tests/benchmarks").glob("*.toml")), ids=lambda path: path.stem)
def test_the_job_of_a_benchmark_passes_the_check(path: Path) -> None:
    assert load_job(path, with_data=False).train.steps > 0


def test_the_ladder_has_five_sizes_of_its_job_and_four_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_plugin_ladder.ladder import read_ladder
    from forge_testing.catalogs import installed

    ladder = read_ladder(ROOT / "configs/ladder.toml", installed())
    assert (len(ladder.sizes), len(ladder.budgets.flops), ladder.job) == (5, 4, "rung.toml")
    for size in ladder.sizes.values():
        assert load("rung", monkeypatch, {f"model.{key}": value for key, value in size.items()}).train.steps > 0


def test_inside_fits_the_length_of_the_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load("inside", monkeypatch)
    autoencoder = job.parallel["taps"].sinks["sae"]
    assert job.train.steps - autoencoder.first_step + 1 == 200, "as its first lines have it"
    assert job.hooks["profile"].start < job.train.steps


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_it_names_no_file_of_the_repository_so_that_it_starts_in_any_folder(path: Path) -> None:
    """But for data that lie in `configs/` beside the jobs."""
    values = [tomllib.loads(path.read_text())]
    for value in values:  # which grows
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    named = [value for value in values if isinstance(value, str) and value and (ROOT / value).exists()]
    assert [value for value in named if not value.startswith("configs/")] == []


@pytest.mark.usefixtures("without_the_model")
@pytest.mark.filterwarnings("ignore:.*(clipped|left out)")
@pytest.mark.parametrize("key", ["steps", "stop_after"])
@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_shortened(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load(name, monkeypatch, {f"train.{key}": 20})
    assert job.train.last_step == (10 if (name, key) == ("smoke", "stop_after") else 20)
    assert key == "stop_after" or job.train.steps == 20


@pytest.mark.usefixtures("without_the_model")
@pytest.mark.parametrize("size", ["0.5b", "2b", "8b"])
def test_stages_and_mixtures_change_at_the_same_steps(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = load_job(f"configs/vlm-{size}.toml", "configs/vlm-stages.toml", world_size=1, with_data=False)
    stages = job.plugins["freeze"].stages
    ends = [sum(stage.steps for stage in stages[: number + 1]) for number in range(len(stages) - 1)]
    assert [phase.start_step for phase in job.data.phases] == ends == [2000, 10_000]
    assert {name for phase in job.data.phases for name in phase.weights} == {s.name for s in job.data.sources}
