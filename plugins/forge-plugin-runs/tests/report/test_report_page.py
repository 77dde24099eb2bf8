"""`forge-run report`: one file about one or several runs, in which nothing of a run is markup and no spike is lost."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from attrs import frozen
from PIL import Image
from report_folders import JOB, Page, steps, write_run

from forge_core.cli import main
from forge_core.contracts.errors import JobError
from forge_core.plugins.catalog import Catalog
from forge_kit.tools.outputs import MARK
from forge_kit.tools.report_sections import Block, HeatMap, Paragraph, ReportRun, ReportSection, Table
from forge_kit.tools.sampled_texts import SampledText, SampledTexts
from forge_plugin_runs.report import write_report
from forge_plugin_runs.report.collect import runs_of, sections_of
from forge_plugin_runs.report.heat_map_png import image_of
from forge_plugin_runs.report.html_blocks import block_html
from forge_plugin_runs.report.markdown import block_markdown
from forge_plugin_runs.report.sections.data import Data
from forge_testing.catalogs import with_components
from forge_testing.refusals import lacks, naming, refuses

EVIL = "<script>alert(1)&quot;'\"<b>"
COUNTS = {"moe/load": {"0": [4.0, 4.0, 8.0, 0.0], "3": [4.0, 4.0, 4.0, 4.0]}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of different lengths with evaluations, counts, samples, a plan, and an evil name."""
    folder = tmp_path_factory.mktemp("runs")
    first = [*steps(200), {"step": 100, "eval/loss": 3.0}, {"step": 200, "eval/loss": 2.5}]
    first[199]["counts"] = COUNTS
    second = steps(120, **{EVIL: [1.0, math.nan] * 60})
    made = [
        write_run(folder / "a", first),
        write_run(folder / EVIL, json.loads(json.dumps(second).replace("NaN", '"nan"')), JOB.format(lr=0.006)),
    ]
    for step, prompt in ((100, f"{EVIL} ``` |"), (120, "later: === step 3 ===\n")):
        SampledTexts(step=step, texts=(SampledText(prompt=prompt, text=" text\x1b\ud800"),)).append(made[1])
    (made[1] / "plan.txt").write_text(f"run            {EVIL}\ndevice         cpu {EVIL}\n")
    return made


@pytest.fixture(scope="module")
def text(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("out") / "report.html"
    write_report(runs, out)
    return out.read_text()


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


class TestOneFile:
    def test_it_is_well_formed_and_refers_to_nothing_outside(self, page: Page, text: str) -> None:
        assert page.unbalanced == []
        links = ("src", "href", "data", "srcset", "action")
        references = [value for _, attributes in page.tags for name, value in attributes.items() if name in links]
        assert references
        assert [value for value in references if not value.startswith(("#", "data:image/png;base64,"))] == []
        assert page.all("link") == []
        assert "@import" not in text
        assert "url(" not in text

    def test_the_policy_lets_only_its_own_style_and_script_in(self, page: Page) -> None:
        policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
        rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
        assert rules["default-src"] == "'none'"
        for name in ("style", "script"):
            [inline] = page.texts[name]
            digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
            assert rules[f"{name}-src"] == f"'sha256-{digest}'"
        for _, attributes in page.tags:
            assert not [name for name in attributes if name == "style" or name.startswith("on")]

    def test_names_keys_plans_and_samples_of_a_run_are_text(self, page: Page) -> None:
        assert len(page.all("script")) == 1
        assert page.all("b") == [{}]  # the label of the heat map
        assert page.words.count("<script>alert(1)") >= 6  # title, legend, tables, plan, sample, curve

    def test_sections_without_anything_are_left_out(self, page: Page, tmp_path: Path) -> None:
        titles = [each["id"] for each in page.all("section")]
        assert titles == ["overview", "curves", "job", "plan", "data", "experts", "samples"]
        out = tmp_path / "bare.html"
        write_report([write_run(tmp_path / "bare", [], "")], out)
        assert [each["id"] for each in Page(out.read_text()).all("section")] == ["overview", "job"]


def test_the_loss_of_a_source_is_that_of_the_last_twentieth_of_the_steps(tmp_path: Path) -> None:
    left = [float(step) for step in range(60)]
    folder = write_run(tmp_path / "run", steps(60, **{"loss/source/left": left}))
    *_, table = Data().blocks(runs_of([folder]))
    assert isinstance(table, Table)
    assert [(row[0], row[-1]) for row in table.rows] == [("left", 58.0), ("right", None)]


class TestCurves:
    def test_every_number_has_a_chart_of_all_runs_that_log_it(self, page: Page) -> None:
        charts = [each["aria-label"] for each in page.all("svg") if each.get("class") == "chart"]
        assert charts[:2] == [f"Training loss against step: a, {EVIL}", "Held-out loss against step: a"]
        assert f"{EVIL} against step: {EVIL}" in charts

    def test_values_are_read_back_from_the_path(self, tmp_path: Path) -> None:
        values = np.random.default_rng(0).normal(size=40)
        out = tmp_path / "report.html"
        write_report([write_run(tmp_path / "a", steps(40, loss=values.tolist()))], out, curves=["loss"])
        [chart] = [each for each in Page(out.read_text()).all("svg") if each.get("class") == "chart"]
        [line] = [each for each in Page(out.read_text()).all("path") if each.get("class", "").startswith("line")]
        numbers = np.array(re.findall(r"-?\d+", line["d"]), int).reshape(-1, 2).cumsum(0)
        (left, right), (low, high) = (tuple(map(float, chart[axis].split())) for axis in ("data-x", "data-y"))
        assert np.allclose(left + numbers[:, 0] / 40_400 * (right - left), range(1, 41), atol=(right - left) / 40_000)
        assert np.allclose(high - numbers[:, 1] / 19_400 * (high - low), values, atol=(high - low) / 19_000)

    def test_a_spike_of_one_step_in_many_survives_in_a_small_file(self, tmp_path: Path) -> None:
        count = 30_000
        values = (3 + np.random.default_rng(0).normal(size=count) / 10).tolist()
        values[12_345], values[24_321], values[7] = 3.9, 1e6, math.nan
        rows = steps(count, loss=values)
        rows[7]["loss"] = "nan"
        out = tmp_path / "report.html"
        assert write_report([write_run(tmp_path / "long", rows)], out, curves=["loss"]) < 50_000
        page = Page(out.read_text())
        assert "long: 1M at 24,322" in page.words  # beyond the axis: a mark
        assert "long: not finite at 8" in page.words
        low, high = map(float, next(each["data-y"] for each in page.all("svg") if "data-y" in each).split())
        assert high < 10
        [band] = [each["d"] for each in page.all("path") if each.get("class", "").startswith("band")]
        tops = np.array(re.findall(r"-?\d+", band), int).reshape(-1, 2).cumsum(0)[:240, 1]
        tops = np.sort(high - tops / 19_400 * (high - low))
        assert tops[-1] == pytest.approx(1e6, rel=1e-3)
        assert tops[-2] == pytest.approx(3.9, abs=1e-3)  # within the axis: the edge of the band
        [line] = [each["d"] for each in page.all("path") if each.get("class", "").startswith("line")]
        means = high - np.array(re.findall(r"-?\d+", line), int).reshape(-1, 2).cumsum(0)[:, 1] / 19_400 * (high - low)
        assert np.abs(means - 3).max() < 0.05  # and the mean is that of the others

    def test_an_outlier_below_does_not_cut_the_peaks(self, tmp_path: Path) -> None:
        values = [5 + math.sin(step / 3) for step in range(200)]
        values[0] = -100.0
        out = tmp_path / "report.html"
        write_report([write_run(tmp_path / "a", steps(200, loss=values))], out, curves=["loss"])
        low, high = map(
            float, next(each["data-y"] for each in Page(out.read_text()).all("svg") if "data-y" in each).split()
        )
        assert low > 0
        assert high > max(values)

    def test_numbers_are_chosen_by_globs(self, runs: list[Path], tmp_path: Path) -> None:
        out = tmp_path / "report.html"
        write_report(runs, out, curves=["*loss"])
        charts = [each["aria-label"] for each in Page(out.read_text()).all("svg") if each.get("class") == "chart"]
        assert [chart.split(" against")[0] for chart in charts] == ["Training loss", "Held-out loss"]
        with refuses("", "--curves los", "'loss'"):
            write_report(runs, out, curves=["los"])


class TestComparison:
    def test_keys_that_differ_are_a_table(self, runs: list[Path], tmp_path: Path) -> None:
        out = tmp_path / "report.md"
        write_report(runs, out, sections=["job"])
        assert "### Keys that differ\n\n| key | a |" in out.read_text()
        assert "\n| optimizer.lr | 0.003 | 0.006 |\n" in out.read_text()
        assert "train.steps" not in out.read_text()

    def test_a_component_that_only_one_run_has_is_one_row(self, runs: list[Path], tmp_path: Path) -> None:
        hook = '[hooks.it]\ntype = "x/it"\nevery = 3\n[hooks.it.inner]\ntype = "x/inner"\nkey = 1\n'
        made = write_run(tmp_path / "b", steps(3), JOB.format(lr=0.003) + hook)
        write_report([runs[0], made], tmp_path / "report.md", sections=["job"])
        table = (tmp_path / "report.md").read_text().partition("### Keys that differ\n\n")[2].partition("\n\n")[0]
        assert table.splitlines()[2:] == ["| hooks.it.type |  | x/it |"]

    def test_shares_of_the_sources_and_balance_of_the_experts(self, page: Page) -> None:
        assert "75.0 %" in page.words
        assert "left: 75.0 %" in page.texts["title"]
        [image] = page.all("img")
        assert (image["width"], image["height"], image["data-rows"]) == ("4", "2", "0\n3")

    def test_runs_of_one_name_are_distinguished_and_one_named_twice_is_refused(self, tmp_path: Path) -> None:
        made = [write_run(tmp_path / name / "run", steps(2)) for name in ("x", "y")]
        assert [run.name for run in runs_of(made)] == ["x/run", "y/run"]
        with pytest.raises(JobError, match="named twice"):
            runs_of([made[0], made[0] / "../run"])


class TestSections:
    def test_another_distribution_adds_one(self, runs: list[Path]) -> None:
        catalog = with_components(Catalog.installed(), {"report_section": {"weather": Weather}})
        [section] = sections_of(runs_of(runs), catalog, chosen=["weather"])
        assert (section.title, section.blocks) == ("Weather", [Paragraph(text="rain in a")])

    @pytest.mark.parametrize("error", ["ZeroDivisionError", "TypeError"])
    def test_one_that_fails_says_so_and_leaves_the_others(self, runs: list[Path], error: str) -> None:
        broken = {"ZeroDivisionError": Broken, "TypeError": OfText}[error]
        catalog = with_components(Catalog.installed(), {"report_section": {"broken": broken}})
        with pytest.warns(UserWarning, match=naming("broken", error)):
            found = {section.name: section for section in sections_of(runs_of(runs), catalog)}
        assert error in found["broken"].blocks[0].text  # type: ignore[union-attr]
        assert "curves" in found

    def test_a_block_of_another_kind_has_no_form(self) -> None:
        for form in (block_html, block_markdown):
            with pytest.raises(TypeError, match=naming("str", "forge_kit.tools.report_sections")):
                form("text")  # type: ignore[arg-type]

    def test_a_form_that_is_none_is_named(self, runs: list[Path], tmp_path: Path) -> None:
        with refuses("", "'pdf'", "html, md"):
            write_report(runs, tmp_path / "report.pdf", form="pdf")
        assert not (tmp_path / "report.pdf").exists()

    def test_goodput_is_one_of_them(self, runs: list[Path], tmp_path: Path) -> None:
        run = write_run(tmp_path / "timed", steps(3))
        events = [
            {"event": "start", "t": 100.0, "start": "s", "began": 100.0, "ranks": 1, "from_step": 0},
            {"event": "ready", "t": 110.0, "start": "s", "step": 0, "s": {"reading data": 10.0}},
            {"event": "steps", "t": 140.0, "start": "s", "first": 1, "step": 3, "n": 3, "s": {"optimizer": 30.0}},
            {"event": "end", "t": 140.0, "start": "s", "code": 0, "cause": "finished"},
        ]
        (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        out = tmp_path / "report.html"
        write_report([runs[0], run], out, sections=["goodput"])
        page = Page(out.read_text())
        assert "productive: 75.0 %" in page.texts["title"]
        assert [each["id"] for each in page.all("section")] == ["goodput"]

    def test_a_section_that_is_not_installed_is_named(self, runs: list[Path]) -> None:
        with refuses("", "'curve'", "'curves'"):
            sections_of(runs_of(runs), Catalog.installed(), chosen=["curve"])


class TestHeatMap:
    def test_colours_say_the_values(self) -> None:
        heat_map = HeatMap(title="", values=[[1.0, 2.0, 0.5], [9.0, math.nan]], rows=["0", "1"], middle=1.0)
        _, _, data = image_of(heat_map).partition(",")
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA"), int)
        sign = np.where(pixels[..., 0] > pixels[..., 2], 1, -1)
        assert np.allclose(1 + sign * pixels[..., 3] / 255, [[1.0, 2.0, 0.5], [2.0, 1.0, 1.0]], atol=0.01)

    def test_a_large_one_is_small(self) -> None:
        values = np.random.default_rng(0).gamma(2, 0.5, (58, 256)).tolist()
        assert len(image_of(HeatMap(title="", values=values, rows=[*map(str, range(58))]))) < 22_000

    def test_a_value_that_is_no_number_keeps_its_place_in_a_text(self) -> None:
        heat_map = HeatMap(title="", values=[[0.0, 1.0, 2.0], [0.0, math.nan, 2.0]], rows=["a", "b"])
        curves = re.findall("[▁▂▃▄▅▆▇█×]{2,}", block_markdown(heat_map))
        assert curves == ["▁▅█", "▁×█"]


class TestMarkdown:
    def test_tables_have_as_many_cells_as_titles_and_nothing_is_markup(self, runs: list[Path], tmp_path: Path) -> None:
        out = tmp_path / "report.md"
        write_report(runs, out)
        text = out.read_text().removesuffix(f"<!-- {MARK} -->\n")
        prose = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert not re.search(r"(?<!\\)<", prose)
        for table in re.findall(r"(?:^\|.*\n)+", prose, re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1
        assert "````text\n" in text  # a sample with a fence of its own

    def test_a_curve_has_its_first_least_largest_and_last_value(self, tmp_path: Path) -> None:
        values = [3.0, math.inf, 1.0, 4.0, 2.0]
        text = json.dumps(steps(5, **{"train/x": values})).replace("Infinity", '"inf"')
        out = tmp_path / "report.md"
        write_report([write_run(tmp_path / "a", json.loads(text))], out, curves=["train/x"])
        [row] = [line for line in out.read_text().splitlines() if line.startswith("| train/x ")]
        assert [cell.strip() for cell in row.split("|")][2:7] == ["a", "3", "1", "4", "2"]


class TestCommand:
    def test_a_trained_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from forge_testing.tiny import TINY_JOB

        monkeypatch.chdir(tmp_path)
        Path("job.toml").write_text(TINY_JOB + "[eval]\ninterval = 2\n")
        assert main(["job.toml", "--hooks.goodput.type=goodput"]) == 0
        capsys.readouterr()
        assert main(["report", "runs/run"]) == 0
        assert re.fullmatch(r"report\.html: \d+ kB, 1 run\n", capsys.readouterr().out)
        page = Page(Path("report.html").read_text())
        sections = [each["id"] for each in page.all("section")]
        assert sections == ["overview", "curves", "job", "plan", "data", "checkpoints", "goodput"]
        assert "finished" in page.words
        assert main(["report", "runs/run", "--format", "md"]) == 0
        assert Path("report.md").read_text().startswith("# run\n\n## Overview\n")
        capsys.readouterr()
        assert main(["report", "runs/run", "--format", "md", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts == {"out": "report.md", "bytes": Path("report.md").stat().st_size, "runs": ["runs/run"]}

    def test_what_is_no_run_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["report", str(tmp_path / "none")]) == 2
        assert not lacks(capsys.readouterr().err, tmp_path / "none")


@frozen(kw_only=True)
class Weather(ReportSection):
    """What the weather was."""

    title = "Weather"

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        yield Paragraph(text=f"rain in {runs[0].name}")


@frozen(kw_only=True)
class Broken(ReportSection):
    """Fails."""

    title = "Broken"

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        yield Paragraph(text=str(1 / 0))


@frozen(kw_only=True)
class OfText(ReportSection):
    """Shows a text, and no block of it."""

    title = "Of text"

    def blocks(self, runs: Sequence[ReportRun]) -> Iterable[Block]:
        yield "text"  # type: ignore[misc]
