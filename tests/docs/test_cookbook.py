"""The cookbook: its jobs pass the check, planned costs follow from steps, seconds and prices, and no row is missing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from fences import ROOT, fences, write_files

from forge_core import load_job

PAGE = ROOT / "docs" / "cookbook.md"
TEXT = PAGE.read_text()
ROWS = ("Job", "Hardware", "Time", "Cost", "Result", "Change next")
RECIPES = {part.splitlines()[0]: part for part in re.split(r"^## \d+\. ", TEXT, flags=re.MULTILINE)[1:]}
"""The text of each job by its heading."""

COMMAND = re.compile(r"(?:^    |^\$ |`)(?:forge-run|torchrun) ([^`\n]*\.toml[^`\n]*)", re.MULTILINE)
COMMANDS = COMMAND.findall(TEXT)

PRICES = {gpu: float(price) for gpu, price in re.findall(r"^\| (\w+) \| \$([\d.]+) \|$", TEXT, re.MULTILINE)}
COST = re.compile(
    r"`(?P<name>[\w-]+)`: (?P<steps>[\d,]+) steps x (?P<seconds>[\d.]+) s x (?P<gpus>\d+) (?P<gpu>\w+): "
    r"\$(?P<least>[\d,]+) at least, \$(?P<likely>[\d,]+) at 40 % of the peak"
)
COSTS = list(COST.finditer(TEXT))


def number(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files of the page and the shipped jobs."""
    write_files(list(fences(PAGE)), tmp_path)
    monkeypatch.chdir(tmp_path)


def test_there_are_ten_jobs_and_more() -> None:
    assert len(RECIPES) >= 10
    assert len(COMMANDS) >= len(RECIPES)
    assert len(re.findall(r"^\| \d+ \| \[", TEXT, re.MULTILINE)) == len(RECIPES)


@pytest.mark.parametrize("heading", RECIPES)
def test_a_job_has_every_row_and_a_curve_or_says_that_it_has_none(heading: str) -> None:
    text = RECIPES[heading]
    assert [row for row in ROWS if f"\n| {row} | " not in text] == []
    assert "](images/" in text or "▁" in text or "\nNo curve: " in text


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("checkout")
def test_a_job_of_the_page_passes_the_check(command: str) -> None:
    words = shlex.split(command)
    files = [word for word in words if word.endswith(".toml")]
    overrides = [word.removeprefix("--") for word in words if re.match(r"--\w+\.", word)]
    ranks = re.search(r"--(?:nproc|nproc-per-node|world-size)[= ](\d+)", command)
    job = load_job(*files, overrides=overrides, world_size=int(ranks[1]) if ranks else 1, with_data=False)
    assert job.train.steps > 0


@pytest.mark.parametrize("cost", COSTS, ids=lambda cost: cost["name"])
@pytest.mark.usefixtures("checkout")
def test_a_planned_cost_is_steps_times_seconds_times_gpus_times_price(cost: re.Match[str]) -> None:
    gpus, seconds = int(cost["gpus"]), float(cost["seconds"])
    job = load_job(f"configs/{cost['name']}.toml", world_size=gpus, with_data=False)
    assert job.train.steps == number(cost["steps"])
    shown = f"{seconds * 1000:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
    assert f" {shown} " in next(text for text in RECIPES.values() if cost[0] in text)
    least = job.train.steps * seconds * gpus / 3600 * PRICES[cost["gpu"]]
    assert number(cost["least"]) == round(least)
    assert number(cost["likely"]) == round(least / 0.4)


def test_each_planned_cost_is_checked() -> None:
    assert len(COSTS) == TEXT.count("at least, $") == 3
