"""The tables that mix sources: `[[data.sources]]` and `[[data.phases]]`, from the job file to shares of samples."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

import attrs
import jsonschema
import pytest
from job_parts import make_catalog

from forge_core import dump_job, load_job
from forge_core.checkpoint.state import Progress
from forge_core.config.mixture import first_step, lr_factor, phase_weights, source_names
from forge_core.data.order import limits, phase_shares
from forge_core.job import DataSection, Job, Phase
from forge_plugin_author.explain import explain
from forge_plugin_author.schema import job_schema

Load = Callable[..., Job]
TWO = """
[train]
steps = 100
global_batch_size = 8
seq_len = 32
[[data.sources]]
type = "text"
path = "web/*.txt"
name = "web"
weight = 3
[[data.sources]]
type = "text"
path = "code/*.txt"
weight = 1
"""
PHASES = """
[[data.phases]]
start_tokens = 10_000
weights = {web = 1, 1 = 4}
[[data.phases]]
start_step = 90
lr_factor = 0.1
[data.phases.weights]
web = 0
"""


def test_phases_are_read_and_written_back(load: Load) -> None:
    job = load(TWO + PHASES)
    assert job.data.phases == (
        Phase(start_tokens=10_000, weights={"web": 1.0, "1": 4.0}),
        Phase(start_step=90, lr_factor=0.1, weights={"web": 0.0}),
    )
    assert load(dump_job(job, make_catalog())).data == job.data
    assert tomllib.loads(dump_job(job, make_catalog()))["data"]["phases"][1] == {
        "start_step": 90,
        "weights": {"web": 0.0},
        "lr_factor": 0.1,
    }


def test_overrides_reach_into_phases(load: Load) -> None:
    flags = ["--data.phases.1.lr_factor=0.5", "--data.phases.0.weights.web=9", "--data.sources.1.name=code"]
    flags += ["--data.phases.0.weights={web = 9}"]
    first, second = load(TWO + PHASES, *flags).data.phases
    assert first.weights == {"web": 9.0}
    assert second.lr_factor == 0.5
    assert load(TWO, "--data.phases=[{start_step = 7}]").data.phases == (Phase(start_step=7),)


def test_phases_made_in_python_are_the_same(load: Load) -> None:
    job = load(TWO)
    made = attrs.evolve(job, data=attrs.evolve(job.data, phases=(Phase(start_step=7, weights={"web": 2.0}),)))
    assert load(dump_job(made, make_catalog())) == made


def test_they_are_explained() -> None:
    text = explain("data.phases", make_catalog())
    assert text.startswith("[[data.phases]]\n")
    assert {line.partition(":")[0] for line in text.splitlines() if line and line[0].isalpha()} >= {
        "start_step",
        "start_tokens",
        "weights",
        "lr_factor",
    }
    assert explain("data.phases.lr_factor", make_catalog()).startswith("lr_factor: float (default 1.0, > 0)")
    assert "phases: array of tables" in explain("data", make_catalog())


@pytest.mark.parametrize(
    ("phase", "valid"),
    [
        ({"start_step": 3, "weights": {"web": 1.5}, "lr_factor": 0.1}, True),
        ({"start_tokens": 3}, True),
        ({"start_step": -1}, False),
        ({"start_step": 3, "lr_factor": 0}, False),
        ({"start_step": 3, "weights": {"web": "1"}}, False),
        ({"start_step": 3, "weight": {"web": 1}}, False),
        ([], False),
    ],
)
def test_the_schema_knows_them(load: Load, phase: Any, valid: bool) -> None:
    schema, _ = job_schema(make_catalog())
    table = tomllib.loads(dump_job(load(TWO), make_catalog()))
    table["data"]["phases"] = [phase]
    assert jsonschema.Draft202012Validator(schema).is_valid(table) == valid


def test_a_source_without_a_name_is_called_by_its_number(load: Load) -> None:
    assert source_names(load(TWO)) == ["web", "1"]


def test_a_source_that_a_phase_does_not_name_keeps_the_weight_it_had(load: Load) -> None:
    assert phase_weights(load(TWO + PHASES)) == [[3.0, 1.0], [1.0, 4.0], [0.0, 4.0]]


def test_a_phase_by_tokens_begins_with_the_first_step_that_starts_at_or_after_them(load: Load) -> None:
    job = load(TWO)
    starts = [first_step(Phase(start_tokens=tokens), job) for tokens in (0, 1, 256, 257, 10_000)]
    assert starts == [0, 1, 1, 2, 40]  # 8 x 32 = 256 positions a step


def test_phases_become_shares_from_a_sample_on(load: Load) -> None:
    assert phase_shares(load(TWO + PHASES)) == [(0, [3, 1]), (320, [1, 4]), (720, [0, 1])]


def test_a_temperature_flattens_the_shares_of_all_phases(load: Load) -> None:
    shares = phase_shares(load(TWO + PHASES, "--data.temperature=2"))
    assert shares[1][1][1] / shares[1][1][0] == pytest.approx(2)
    assert shares[2] == (720, [0, 1])


def test_a_phase_factor_replaces_the_one_before(load: Load) -> None:
    job = load(TWO + PHASES, "--data.phases.0.lr_factor=0.5")
    factors = [lr_factor(job, step, 256 * step) for step in (0, 39, 40, 89, 90, 99)]
    assert factors == [1.0, 1.0, 0.5, 0.5, 0.1, 0.1]


def test_phases_count_from_where_the_run_is_if_the_batch_size_has_changed(load: Load) -> None:
    """After 10 steps with batches of 4, which the job no longer says."""
    job = load(TWO + PHASES)
    progress = Progress(step=10, tokens=10 * 4 * 32, samples={"drawn": 40, "sources": {}})
    assert phase_shares(job, progress) == [(0, [3, 1]), (40 + 35 * 8, [1, 4]), (40 + 80 * 8, [0, 1])]
    assert 10 * 4 * 32 + 35 * 256 >= 10_000 > 10 * 4 * 32 + 34 * 256


@pytest.mark.parametrize(
    ("epochs", "size", "limit"), [(0.0, 10, None), (2.0, 10, 20), (1.5, 9, 13), (0.29, 100, 29), (1.0, None, None)]
)
def test_a_limit_is_a_whole_number_of_sequences(load: Load, epochs: float, size: int | None, limit: int | None) -> None:
    job = load("", f"--data.sources.0.max_epochs={epochs}")
    assert limits(job, [size]) == [limit]


def test_the_defaults_change_nothing() -> None:
    assert attrs.fields_dict(DataSection)["phases"].default == ()
    assert attrs.fields_dict(DataSection)["temperature"].default == 1.0


def test_a_job_with_phases_is_read_from_several_files(write: Callable[..., Any], load: Load) -> None:
    load(TWO)
    write(PHASES, "anneal.toml")
    job = load_job("good.toml", "job.toml", "anneal.toml", catalog=make_catalog())
    assert len(job.data.phases) == 2
