"""The picture of a run, and the history that it shows."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.metrics.jsonl import JsonLines
from forge_plugin_curves import Curves
from forge_plugin_curves.history import History, Series
from forge_plugin_curves.picture import draw

PNG = b"\x89PNG\r\n\x1a\n"


def line(step: int, **numbers: Any) -> dict[str, Any]:
    return {"step": step, "loss": 5.0 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100 * step, **numbers}


def make_logger(folder: Path, step: int = 0) -> Any:
    job = SimpleNamespace(job=SimpleNamespace(name="a run"), loggers={"jsonl": JsonLines()})
    logger = Curves().build(SimpleNamespace(folder=folder, job=job))
    logger.start(step)
    return logger


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, tuple[list[int], list[float]]]]:
    """What would have been drawn, each time: the steps and values of every metric."""
    pictures: list[Any] = []

    def record(history: History, title: str, smoothing: float, path: Path) -> None:
        names = ("loss", "eval/loss")
        pictures.append({name: (list(history[name].steps), list(history[name].values)) for name in names})

    monkeypatch.setattr("forge_plugin_curves.picture.draw", record)
    return pictures


# --- when it is drawn -----------------------------------------------------------------------------------------------


def test_it_is_drawn_after_each_evaluation_and_at_the_end(tmp_path: Path, drawn: list[Any]) -> None:
    logger = make_logger(tmp_path)
    logger.log(line(1))
    assert not drawn
    logger.log({"step": 1, "eval/loss": 4.0})
    logger.log(line(2))
    logger.close()
    assert drawn == [
        {"loss": ([1], [5.0]), "eval/loss": ([1], [4.0])},
        {"loss": ([1, 2], [5.0, 2.5]), "eval/loss": ([1], [4.0])},
    ]


def test_nothing_is_drawn_of_a_run_that_measured_nothing(tmp_path: Path, drawn: list[Any]) -> None:
    make_logger(tmp_path).close()
    assert not drawn


def test_a_continued_run_keeps_the_part_before_its_checkpoint(tmp_path: Path, drawn: list[Any]) -> None:
    records = [line(1), line(2), {"step": 2, "eval/loss": 4.0}, line(3, loss="nan"), line(4)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 5, "lo')
    logger = make_logger(tmp_path, step=3)
    logger.log(line(4, loss=1.0))
    logger.close()
    (picture,) = drawn
    assert picture["eval/loss"] == ([2], [4.0])
    steps, values = picture["loss"]
    assert steps == [1, 2, 3, 4]
    assert values == pytest.approx([5.0, 2.5, math.nan, 1.0], nan_ok=True)


def test_a_run_leaves_its_picture(make_job: Callable[..., Any], train: Callable[..., Any]) -> None:
    summary = train(make_job(steps=3, loggers={"curves": Curves()}, eval={"interval": 2}))
    assert (summary.folder / "curves.png").read_bytes().startswith(PNG)
    assert not list(summary.folder.glob("*unfinished*"))


# --- what is drawn --------------------------------------------------------------------------------------------------


def history_of(*records: dict[str, Any]) -> History:
    history = History()
    for record in records:
        history.add(record)
    return history


@pytest.mark.parametrize(
    "history",
    [
        history_of(line(1)),
        history_of({"step": 0, "eval/loss": 3.0, "eval/bits_per_byte": 1.0}),
        history_of(*(line(step) for step in range(1, 300)), {"step": 299, "eval/loss": 1.0, "eval/perplexity": 3.0}),
        history_of(line(1), line(2, loss=math.nan, grad_norm=math.inf), line(3, grad_norm=0.0)),
        history_of(*(line(step, loss=math.nan, grad_norm=math.nan) for step in range(1, 200))),
    ],
    ids=["one step", "evaluation only", "many steps", "not finite", "never finite"],
)
@pytest.mark.filterwarnings("error")
def test_any_history_can_be_drawn(history: History, tmp_path: Path) -> None:
    draw(history, "a run", 0.02, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_the_picture_is_replaced_whole(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    draw(history_of(line(1)), "first", 0.02, picture)
    first = picture.read_bytes()
    kept = picture.open("rb")  # a viewer that opened the old one goes on reading it
    draw(history_of(line(1), line(2)), "second", 0.02, picture)
    assert kept.read() == first != picture.read_bytes()
    kept.close()


def test_drawing_leaves_matplotlib_as_it_was_and_needs_no_pyplot(tmp_path: Path) -> None:
    code = f"""
import sys, matplotlib
names = [name for name in matplotlib.rcParams if name != "backend"]  # to ask for this one imports pyplot
before = [matplotlib.rcParams[name] for name in names]
from pathlib import Path
from forge_plugin_curves.history import History
from forge_plugin_curves.picture import draw
history = History()
history.add({{"step": 1, "loss": 1.0, "lr": 1.0, "grad_norm": 1.0}})
draw(history, "a run", 0.02, Path({str(tmp_path / "curves.png")!r}))
assert "matplotlib.pyplot" not in sys.modules
assert [matplotlib.rcParams[name] for name in names] == before
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- smoothing ------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.integers(1, 20))
def test_means_stay_within_the_values(values: list[float], window: int) -> None:
    smoothed = Series(list(range(len(values))), values).smoothed(window)
    assert len(smoothed) == len(values)
    assert all(min(values) - 1e-6 <= mean <= max(values) + 1e-6 for mean in smoothed)
    assert smoothed[0] == pytest.approx(values[0])


def test_a_straight_line_stays_where_it_is_and_does_not_lag() -> None:
    values = [10.0 - 0.5 * step for step in range(50)]
    assert Series(list(range(50)), values).smoothed(9)[:-4] == pytest.approx(values[:-4])


def test_values_that_are_not_finite_do_not_spread() -> None:
    smoothed = Series([1, 2, 3, 4], [1.0, math.nan, 3.0, math.inf]).smoothed(3)
    assert smoothed == pytest.approx([1.0, 2.0, 3.0, 3.0])


# --- the component --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_smoothing_is_a_share_of_the_run(smoothing: float) -> None:
    with pytest.raises(ValueError, match="smoothing"):
        Curves(smoothing=smoothing)


def test_importing_the_plugin_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, forge_plugin_curves; sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
