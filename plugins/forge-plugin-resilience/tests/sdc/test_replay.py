"""`forge-run replay`: any step of a run again, and what made it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import flipped_bits
import pytest
from flipped_bits import FlipsWeight, curve

from forge_core import Trainer, TrainingHook
from forge_core.cli import main
from forge_plugin_resilience.sdc import SDC
from forge_plugin_resilience.sdc.verdict import Replay
from forge_testing.refusals import lacks

PARTS = Path(flipped_bits.__file__)
TEXT = "the cat sat on the mat and the dog sat on the log\n"


class StopAt(TrainingHook):
    """Ends the run after step 9, as a signal would."""

    def on_step_end(self, context):
        if context.step == 9:
            context.request_stop("enough")


def job_of(folder):
    """Two sources, one of them poisoned; every third update is skipped, and weights are averaged."""
    noise = random.Random(0)
    for number in range(8):
        (folder / f"{number}.txt").write_text(TEXT * 20)
    (folder / "poison.txt").write_text("".join(chr(noise.randrange(33, 126)) for _ in range(120)))
    sources = {"clean": ("[0-9]*.txt", 1.0), "crawl": ("poison.txt", 0.03)}
    table = {"type": "text", "held_out_every": 0}
    data = [{**table, "name": n, "path": f"{folder}/{p}", "weight": w} for n, (p, w) in sources.items()]
    return {
        "train": {"steps": 15, "global_batch_size": 8, "micro_batch_size": 4, "seq_len": 32, "device": "cpu"},
        "model": {"type": "transformer", "dim": 32, "layers": 1, "attention": {"heads": 2}},
        "data": {"tokenizer": {"type": "bpe", "vocab_size": 264}, "sources": data},
        "optimizer": {"type": "adamw", "lr": 0.02},
        "checkpoint": {"interval": 4, "keep": 0},
        "hooks": {"skips": {"type": f"{PARTS}:SkipsThird"}},
        "plugins": {"sdc": {"every": 1}, "ema": {"decay": 0.5}},
        "job": {"output": str(folder), "name": "run"},
    }


def train(job, *hooks):
    return Trainer(job, hooks=hooks, echo=lambda text: None).run()


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replay(capsys, *arguments):
    capsys.readouterr()
    assert main(["replay", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_poisoned_document_is_found_in_a_run_that_skipped_updates_and_was_resumed(tmp_path, capsys):
    job = job_of(tmp_path)
    train(job, StopAt())
    summary = train(job)
    rows = {row["step"]: row for row in summary.metrics()}
    step = max(range(10, 15), key=lambda number: rows[number].get("loss/source/crawl", 0.0))
    before = files_of(summary.folder)
    shown = replay(capsys, summary.folder, "--step", step, "--digest", "--worst", 3)
    assert files_of(summary.folder) == before
    for name in ("recorded", "again"):
        assert f"  {name:<9} loss {rows[step]['loss']!r}, grad norm {rows[step]['grad_norm']!r}" in shown
    assert len(set(re.findall(r"^  (?:recorded|again) +([0-9a-f]{16})$", shown, re.MULTILINE))) == 1
    assert "HARDWARE" not in shown
    assert not lacks(shown, "gradients", "to the bit")
    assert re.search(r"DATA: \d of 8 sequences stands? out", shown)
    worst = shown.partition("in nats a token\n")[2].splitlines()
    assert len(worst) == 3
    assert "  crawl  " in worst[0]
    assert "the cat" not in worst[0]
    facts = json.loads(replay(capsys, summary.folder, "--step", step, "--digest", "--worst", 3, "--json"))
    assert facts["recorded"] == facts["again"]
    assert [facts["again"][name] for name in ("loss", "grad_norm")] == [rows[step][n] for n in ("loss", "grad_norm")]
    assert facts["again"]["gradients"][0] in shown
    assert (facts["run"], facts["step"], facts["cause"]) == (str(summary.folder), step, "data")
    assert facts["verdict"] in " ".join(shown.split("\n"))
    assert facts["sequences"] == 8
    rewritten = [
        f"  {e['loss']:.4f}  {e['source']}  {json.dumps(e['text'], ensure_ascii=False)}" for e in facts["worst"]
    ]
    assert rewritten == worst


@pytest.mark.thorough
def test_a_weight_that_flipped_is_hardware_from_the_step_after_it_on(tmp_path, capsys):
    summary = train(job_of(tmp_path), FlipsWeight(rank=0, step=9, name="layers."))
    shown = replay(capsys, summary.folder, "--step", 11, "--worst", 1)
    assert not lacks(shown, "HARDWARE: from step 10 on", "to the bit")


@pytest.mark.thorough
def test_ranks_of_a_run_are_replayed_by_as_many(tmp_path, capsys):
    with capsys.disabled():  # ranks need a standard error with a number
        plugins = {"sdc": SDC(every=3)}
        [rows, _] = curve(tmp_path, layout="fsdp2", steps=6, plugins=plugins, checkpoint={"interval": 2})
    shown = replay(capsys, tmp_path / "run", "--step", 6, "--digest", "--nproc", 2)
    assert f"  again     loss {rows[5][1]!r}, grad norm {rows[5][2]!r}" in shown
    assert "HARDWARE" not in shown
    assert not lacks(shown, "gradients", "to the bit")
    assert "worst 8 of 8 sequences" in shown
    with_one = replay(capsys, tmp_path / "run", "--step", 6)
    assert "to the bit" in with_one or "rounding" in with_one


@pytest.mark.parametrize(
    ("arguments", "code", "facts"),
    [
        (["nowhere", "--step", "1"], 2, ["nowhere", "job.toml"]),
        (["run", "--step", "9"], 1, ["step 9", 4]),
    ],
)
def test_what_cannot_be_replayed_is_refused(make_job, train, monkeypatch, tmp_path, capsys, arguments, code, facts):
    train(make_job(job={"name": "run"}))
    monkeypatch.chdir(tmp_path)
    assert main(["replay", *arguments]) == code
    assert not lacks(capsys.readouterr().err, *facts)


def test_ranks_need_a_folder_for_all_of_them(monkeypatch, capsys):
    world = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "::1", "MASTER_PORT": 1}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    assert main(["replay", "run", "--step", "1"]) == 2
    assert not lacks(capsys.readouterr().err, "--scratch")


class TestVerdict:
    RECORDED = {1: (4.0, 1.0), 2: (3.5, 1.0), 3: (3.0, 1.0), 4: (9.0, 1.0)}

    def verdict(self, **changes):
        values = {"step": 4, "recorded": self.RECORDED, "again": dict([*self.RECORDED.items()][1:]), "worst": []}
        values |= {"recorded_gradients": ["a", "b"], "gradients": ["a", "b"], "losses": [9.0, 8.9, 9.1, 9.0]}
        return " ".join(Replay(**values | changes).verdict())

    def test_all_sequences_worse_than_usual_are_weights(self):
        assert "WEIGHTS:" in self.verdict()

    def test_one_sequence_is_data(self):
        assert not lacks(self.verdict(losses=[3.0, 3.1, 2.9, 20.0]), "DATA: 1 of 4", "20.0000")
        assert not lacks(self.verdict(losses=[3.0, 3.1, 2.9, float("inf")]), "DATA: 1 of 4", "inf")

    def test_a_sequence_that_makes_the_step_worse_is_data_where_all_losses_differ(self):
        # Far from no other by the spread of these four, which it widens itself
        unlike = [7.09, 2.46, 1.39, 1.26]
        recorded = {step: (2.2 + step % 2 / 10, 1.0) for step in range(1, 21)} | {21: (3.05, 1.0)}
        step = {"step": 21, "recorded": recorded, "again": {21: (3.05, 1.0)}}
        assert not lacks(self.verdict(**step, losses=unlike), "DATA: 1 of 4", "7.0900")
        assert "Neither" in self.verdict(**step, losses=[3.2, 2.46, 1.39, 1.26])
        assert not lacks(self.verdict(**step, losses=[4.5, 4.4, 4.3, 0.2]), "WEIGHTS:")

    def test_another_rank_is_named_by_its_gradients(self):
        assert not lacks(self.verdict(gradients=["a", "c"]), "gradients", "rank 1")

    def test_the_cause_is_a_key_of_the_facts(self):
        def cause(**changes):
            values = {
                "step": 4,
                "recorded": self.RECORDED,
                "again": self.RECORDED,
                "worst": [],
                "recorded_gradients": [],
            }
            return Replay(**values | {"gradients": [""], "losses": [9.0]} | changes).facts()

        assert (cause()["cause"], cause()["again"]["gradients"]) == ("weights", [])
        assert cause(again={3: (3.0, 1.0), 4: (9.5, 1.0)})["cause"] == "hardware"
        assert cause(losses=[3.0, 3.1, 2.9, 20.0])["cause"] == "data"
        assert cause(step=3, losses=[3.0])["cause"] is None

    def test_small_differences_from_the_first_step_on_may_be_rounding(self):
        again = {step: (loss * (1 + 1e-6), norm) for step, (loss, norm) in self.RECORDED.items()}
        assert "rounding" in self.verdict(again=again, gradients=[])
        again[1] = self.RECORDED[1]
        assert not lacks(self.verdict(again=again), "HARDWARE: from step 2")

    def test_numbers_that_are_not_finite_are_the_same_again(self):
        rows = {1: (4.0, 1.0), 2: (float("nan"), float("inf"))}
        told = self.verdict(step=2, recorded=rows, again=rows, losses=[1.0, 1.0, 1.0, float("inf")])
        assert "to the bit" in told
        assert "DATA" in told
