"""The picture of a run: what it shows, when it is drawn, and what may go wrong."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from forge_core.contracts.components import TrainingHook
from forge_plugin_runs.curves import Curves
from forge_plugin_runs.curves.history import Average, History, Series, read_lines
from forge_plugin_runs.curves.logger import CurvesLogger
from forge_plugin_runs.curves.marks import envelope
from forge_plugin_runs.curves.panels import draw, make_figure
from forge_testing.refusals import naming


def training(step, loss=4.0, grad_norm=1.0, lr=1e-3):
    return {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": step * 1000}


def evaluation(step, loss, **more):
    return {"step": step, "eval/loss": loss, "eval/perplexity": math.exp(loss), **more}


@pytest.fixture
def panels():
    """The four panels of the picture of some lines of metrics."""

    def build(*records, horizon=1, **settings):
        history = History(horizon)
        for record in records:
            history.add(record)
        return make_figure(history, **{"title": "a-run", "total_steps": 10, "clip_norm": 0.0} | settings).axes

    return build


def texts(axes):
    return [text.get_text() for text in axes.texts]


def lines(axes):
    """{label in the legend: values}."""
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines}


# --- what it shows -----------------------------------------------------------------------------------------------


def test_each_step_its_average_and_the_held_out_loss_are_on_one_panel(panels):
    loss, *_ = panels(training(1, 4.0), training(2, 2.0), evaluation(2, 3.0), horizon=2)
    found = lines(loss)
    assert found["each step"] == [4.0, 2.0]
    assert found["mean of about 2 steps"] == pytest.approx([4.0, (0.5 * 2 + 0.25 * 4) / 0.75])
    assert found["held out"] == [3.0]


def test_what_layers_count_is_a_map_relative_to_the_mean_of_each_layer(panels):
    counts = ({"0": [1, 3], "3": [5, 0, 1]}, {"0": [9, 3], "3": [2, 0, 1]})
    steps = ({**training(step), "counts": {"load": rows}} for step, rows in enumerate(counts, 1))
    *_, norm, load, _ = panels(*steps, horizon=2)
    assert load.get_title("left") == "load, relative to the mean of its layer"
    assert [label.get_text() for label in load.get_yticklabels()] == ["0", "3"]
    expected = [[9.5 / 7, 4.5 / 7, -1], [4.5 / 2, 0, 1.5 / 2]]  # the step before weighs half
    np.testing.assert_allclose(load.images[0].get_array().filled(-1), expected)
    assert norm.get_xlabel() == "step"


def test_counts_of_the_same_numbers_share_a_map(panels):
    rows, others = {"0": [1, 3]}, {"0": [3, 1]}
    titles = [
        axes.get_title("left")
        for axes in panels({**training(1), "counts": {"chosen": rows, "other": others, "load": rows}})
    ]
    assert [title.removesuffix(", relative to the mean of its layer") for title in titles if "layer" in title] == [
        "chosen, load",
        "other",
    ]


def test_what_may_be_negative_is_on_a_map_as_it_is(panels):
    *_, bias, _ = panels({**training(1), "counts": {"bias": {"0": [-0.5, 0.25]}}})
    assert bias.get_title("left") == "bias"
    np.testing.assert_allclose(bias.images[0].get_array(), [[-0.5, 0.25]])
    assert bias.images[0].get_clim() == (-0.5, 0.5)


def test_the_last_held_out_values_stand_beside_their_points(panels):
    loss, held_out, *_ = panels(
        training(1), evaluation(1, 5.0), evaluation(2, 3.25, **{"eval/bits_per_byte": 1.5}), training(2)
    )
    assert texts(loss) == ["3.25"]
    assert texts(held_out) == ["1.5"]


def test_points_that_crowd_are_small(panels):
    def size(evaluations):
        [line] = panels(training(1), *(evaluation(step, 3.0) for step in range(evaluations)))[1].lines
        return line.get_markersize()

    assert (size(39), size(40)) == (5, 2.5)


def test_bits_per_byte_are_shown_if_known_else_perplexity(panels):
    def title(*records):
        return panels(training(1), *records)[1].get_title(loc="left")

    assert title(evaluation(1, 3.0, **{"eval/bits_per_byte": 1.5})) == "Held-out bits per byte"
    assert title(evaluation(1, 3.0)) == "Held-out perplexity"
    assert title({"step": 1, "eval/reward": 0.5, "eval/ended": 1.0}) == "Held-out reward"


def test_a_run_without_an_evaluation_says_so(panels):
    assert texts(panels(training(1))[1]) == ["no evaluation yet"]


def test_the_run_is_named_with_how_far_it_is(panels):
    figure = panels(training(1), training(2), title="big-run", total_steps=1234)[0].figure
    assert [text.get_text() for text in figure.texts] == [
        "big-run",
        "step 2 of 1,234   ·   2.0k tokens   ·   loss 4.0000",
    ]


def test_the_heading_has_the_loss_of_the_last_step_and_no_average(panels):
    figure = panels(training(1, 4.0), training(2, 2.0), horizon=2)[0].figure
    assert "loss 2.0000" in figure.texts[1].get_text()


def test_values_that_are_not_finite_are_gaps_with_crosses(panels):
    loss, _, _, norm = panels(training(1), training(2, "nan", "inf"), training(3, math.nan, 2.0))
    assert np.isnan(lines(loss)["each step"]).tolist() == [False, True, True]
    assert len(lines(loss)["not finite (2)"]) == 2
    assert len(lines(norm)["not finite (1)"]) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "records",
    [
        [training(1)],
        [evaluation(0, 3.0)],
        [training(1, math.nan, math.nan), evaluation(1, math.nan)],
        [training(1, grad_norm=0.0, lr=0.0), training(2, grad_norm=1e9, lr=0.0)],
        [training(step, math.nan, math.inf) for step in range(1, 3000)],
    ],
    ids=["one step", "only an evaluation", "nothing finite", "from zero to a billion", "long and nothing finite"],
)
def test_any_run_can_be_drawn(records, tmp_path):
    history = History(10)
    for record in records:
        history.add(record)
    draw(history, tmp_path / "curves.png", title="a-run", total_steps=10, clip_norm=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_where_gradients_are_clipped_is_marked_if_it_is_in_view(panels):
    assert "clipped to 1" in lines(panels(training(1, grad_norm=0.5), training(2, grad_norm=2.0), clip_norm=1.0)[3])
    assert "clipped to 9" not in lines(panels(training(1, grad_norm=0.5), training(2, grad_norm=2.0), clip_norm=9.0)[3])


def test_one_spike_does_not_press_the_loss_flat(panels):
    records = [training(step, 4.0 + 0.1 * math.sin(step)) for step in range(1, 1000)]
    loss, *_ = panels(*records, training(1000, 500.0), horizon=100)
    assert loss.get_ylim()[1] < 15


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=300), st.integers(1, 40))
def test_a_long_series_keeps_its_spikes_when_it_is_thinned(values, columns):
    series = Series()
    for step, value in enumerate(values):
        series.add(step, value)
    x, y = envelope(series, columns)
    assert len(x) == len(y) <= max(len(values), 2 * columns)
    assert list(x) == sorted(x)
    finite = [value for value in values if not math.isnan(value)]
    assert not finite or (np.nanmin(y), np.nanmax(y)) == (min(finite), max(finite))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50), st.integers(1, 20))
def test_the_average_is_the_weighted_mean_with_weights_that_add_up_to_one(values, horizon):
    average, beta = Average(horizon), 1 - 1 / horizon
    found = [average.add(value) for value in values][-1]
    weights = [beta ** (len(values) - 1 - i) for i in range(len(values))]
    assert found == pytest.approx(np.average(values, weights=weights), rel=1e-9, abs=1e-9)


def test_the_average_leaves_out_what_is_not_finite():
    average = Average(4)
    assert math.isnan(average.add(math.nan))
    assert [average.add(value) for value in (2.0, math.inf, math.nan)] == [2.0, 2.0, 2.0]


# --- in a run ----------------------------------------------------------------------------------------------------


@define(kw_only=True, slots=False)
class Looks(TrainingHook):
    """Looks at the picture after each evaluation, and fails at a step."""

    fail_at: int = 0
    seen: list[bytes] = field(init=False, factory=list)

    def on_eval_end(self, context, metrics):
        self.seen.append((context.folder / "curves.png").read_bytes())

    def on_step_end(self, context):
        if context.step == self.fail_at:
            raise RuntimeError("failed")

    def state_dict(self):
        return {}


def test_it_is_drawn_at_each_evaluation_and_at_the_end(make_job, train):
    hook = Looks()
    summary = train(make_job(eval={"interval": 2}, steps=5, loggers={"curves": Curves()}), hook)
    assert len(set(hook.seen)) == 3
    assert (summary.folder / "curves.png").read_bytes() == hook.seen[-1]


def test_a_run_that_fails_leaves_its_picture(make_job, train, tmp_path):
    with pytest.raises(RuntimeError, match="failed"):
        train(make_job(loggers={"curves": Curves()}), Looks(fail_at=3))
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_a_continued_run_is_that_of_one_that_never_stopped(make_job, train, tmp_path):
    keys = {"steps": 4, "eval": {"interval": 2}, "checkpoint": {"interval": 2}, "loggers": {"curves": Curves()}}
    whole = train(make_job(job={"output": str(tmp_path / "other")}, **keys))
    with pytest.raises(RuntimeError, match="failed"):
        train(make_job(**keys), Looks(fail_at=3))
    continued = train(make_job(**keys))
    assert (continued.folder / "curves.png").read_bytes() == (whole.folder / "curves.png").read_bytes()


def test_a_picture_that_cannot_be_drawn_is_a_warning(make_job, train, tmp_path):
    in_the_way = tmp_path / "run" / "curves.png"
    in_the_way.mkdir(parents=True)
    with pytest.warns(UserWarning, match=naming("curves.png", "IsADirectoryError")):
        assert train(make_job(loggers={"curves": Curves()})).step == 4


def test_a_viewer_that_has_the_picture_open_goes_on_seeing_it_whole(tmp_path):
    history, path = History(1), tmp_path / "curves.png"
    history.add(training(1))
    draw(history, path, title="first", total_steps=1, clip_norm=0.0)
    first = path.read_bytes()
    with path.open("rb") as opened:
        draw(history, path, title="second", total_steps=1, clip_norm=0.0)
        assert opened.read() == first != path.read_bytes()


def test_nothing_is_drawn_of_a_run_that_measured_nothing(tmp_path):
    keys = {"title": "a-run", "total_steps": 1, "clip_norm": 0.0, "horizon": 1}
    logger = CurvesLogger(path=tmp_path / "curves.png", metrics=tmp_path / "metrics.jsonl", **keys)
    logger.start(0)
    logger.close()
    assert not list(tmp_path.iterdir())


def test_lines_beyond_the_start_and_torn_ones_are_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n{"step": 3, "loss": 3}\n{"step": 4, "lo')
    assert list(read_lines(path, 2)) == [{"step": 1, "loss": 1}, {"step": 2, "loss": 2}]
    assert not list(read_lines(tmp_path / "missing.jsonl", 2))


ALONE = """
import sys
import forge_plugin_runs.curves
heavy = {"torch", "numpy", "matplotlib"} & set(sys.modules)
assert not heavy, heavy

import matplotlib
names = [name for name in matplotlib.rcParams if name != "backend"]  # asking for that one imports pyplot
before = [matplotlib.rcParams[name] for name in names]
from pathlib import Path
from forge_plugin_runs.curves.panels import draw
from forge_plugin_runs.curves.history import History
history = History(1)
history.add({"step": 1, "loss": 1.0, "lr": 1.0, "grad_norm": 1.0})
draw(history, Path(sys.argv[1]), title="a run", total_steps=1, clip_norm=1.0)
assert "matplotlib.pyplot" not in sys.modules
assert before == [matplotlib.rcParams[name] for name in names]
"""


def test_it_imports_nothing_heavy_before_it_draws_and_leaves_matplotlib_as_it_was(tmp_path):
    """pyplot would keep figures and look for a display."""
    subprocess.run([sys.executable, "-c", ALONE, str(tmp_path / "curves.png")], check=True)
