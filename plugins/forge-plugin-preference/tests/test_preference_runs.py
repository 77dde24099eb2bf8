"""Runs as a user starts them: job files, known answers, a loss in a local file, references in data, continued runs."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, frozen
from preference_runs import observe, pair_lines, preference_job, prepared, write_lines

from forge_core import TrainingHook
from forge_core.cli import main
from forge_core.contracts.errors import ForgeError, JobError
from forge_core.engine.build import build_context, build_run
from forge_core.engine.trainer import Trainer
from forge_plugin_checkpoints import Parts
from forge_plugin_losses.log_probabilities import log_probabilities
from forge_plugin_preference import DPO, IPO, KTO, Pairs, SimPO
from forge_plugin_preference.hooks import SameReference
from forge_plugin_preference.objective import objective_of
from forge_plugin_text import Bytes
from forge_testing import TinyModel
from forge_testing.catalogs import installed
from forge_testing.laws import Interrupted, resumption_law
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks

BASE = """
job = { name = "dpo", output = "runs" }
train = { steps = 12, global_batch_size = 4, seq_len = 64, precision = "fp64", device = "cpu" }
optimizer = { type = "adamw", lr = 2e-2 }
data.tokenizer.type = "bytes"
[model]
type = "transformer"
dim = 16
layers = 2
vocab_size = 258
attention = { heads = 4, kv_heads = 2 }
"""
TEXT = """
[[data.sources]]
type = "text"
path = "text.txt"
"""
PREFERENCES = """
[checkpoint.load]
path = "REFERENCE"
[loss]
type = "dpo"
reference = "REFERENCE"
[evaluations.preferences]
type = "preferences"
[[data.sources]]
type = "pairs"
path = "pairs.jsonl"
held_out_every = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user who has trained a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Which is it? It is this one, and not the other one. " * 20)
    write_lines(tmp_path / "pairs.jsonl", pair_lines(20))
    for name, text in {"base": BASE, "text": TEXT, "dpo": PREFERENCES}.items():
        (tmp_path / f"{name}.toml").write_text(text.replace("REFERENCE", prepared().reference))
    return tmp_path


def lines(folder: Path, name: str = "dpo") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def test_a_job_file_learns_preferences_from_a_trained_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "base.toml", "dpo.toml"]) == 0
    assert main(["base.toml", "dpo.toml"]) == 0
    out = capsys.readouterr().out
    assert "16 pairs, up to" in out
    assert "0.693147 (the model starts as the reference" in out
    steps = [line for line in lines(folder) if "loss/dpo" in line]
    assert steps[0]["loss/dpo"] == pytest.approx(math.log(2), rel=1e-12)
    assert steps[0]["rewards/margin"] == 0
    assert steps[-1]["rewards/accuracy"] > 0.9
    assert steps[-1]["rewards/margin"] > 1
    assert steps[-1]["rewards/margin"] == pytest.approx(
        steps[-1]["rewards/chosen"] - steps[-1]["rewards/rejected"], rel=1e-5
    )
    [evaluation] = [line for line in lines(folder) if "eval/loss/dpo" in line]
    assert evaluation["eval/rewards/accuracy"] > 0.7
    assert evaluation["eval/loss/dpo"] < 0.5


MINE = '''
from attrs import field, frozen
from attrs.validators import gt

from forge_plugin_preference import PairLoss


@frozen(kw_only=True)
class Mine(PairLoss):
    """max(0, margin - (log p(chosen) - log p(rejected))), by token."""

    margin: float = field(default=0.5, validator=gt(0))
    """Nats a token by which the chosen answer shall be likelier."""

    def losses(self, chosen, rejected):
        return (self.margin - chosen.mean_log_p + rejected.mean_log_p).clamp(min=0)
'''


def test_a_loss_of_a_local_file_takes_one_method(folder: Path) -> None:
    (folder / "mine.py").write_text(MINE)
    keys = ['--loss={type = "./mine.py:Mine", margin = 0.7}', "--job.name=mine"]
    assert main(["base.toml", "dpo.toml", *keys]) == 0
    steps = [line["loss/mine"] for line in lines(folder, "mine") if "loss/mine" in line]
    assert steps[-1] < 0.5 * steps[0]


def test_a_loss_of_another_shape_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(MINE.replace(".clamp(min=0)", ".clamp(min=0).mean()"))
    assert main(["base.toml", "dpo.toml", '--loss={type = "./mine.py:Mine"}']) != 0
    assert "Mine.losses returned the shape () for" in capsys.readouterr().err


def test_a_reference_that_is_not_there_is_refused_by_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "base.toml", "dpo.toml", "--loss.reference=runs/other"]) != 0
    assert "loss.reference: runs/other does not exist; give a checkpoint" in capsys.readouterr().err


def test_text_is_refused_by_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "base.toml", "dpo.toml", "text.toml"]) != 0
    assert "compares answers, and data.sources.0 (Text) gives none" in capsys.readouterr().err


# --- known answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "known"),
    [(DPO, math.log(2)), (IPO, 1.0), (KTO, 0.5), (lambda **k: KTO(**k, desirable_weight=3.0), None)],
)
def test_the_first_loss_is_known(loss: Any, known: float | None, tmp_path: Path) -> None:
    loss = loss(reference=prepared().reference, beta=0.5)
    job = preference_job(tmp_path, loss, steps=2, checkpoint={"load": Parts(path=prepared().reference)})
    Trainer(job, catalog=installed(), echo=lambda text: None).run()
    first = json.loads(next(tmp_path.glob("*/metrics.jsonl")).read_text().splitlines()[0])
    if known is None:
        known = (3 * first["kto/desirable"] + 1 - first["kto/desirable"]) / 2
        assert 0 < first["kto/desirable"] < 1
    assert first[loss.metric] == pytest.approx(known, rel=1e-12)


@define(kw_only=True, slots=False)
class Disturb(TrainingHook):
    """Changes the model after its weights were loaded."""

    def on_train_begin(self, context: Any) -> None:
        for parameter in context.model.parameters():
            parameter.data.mul_(1.1)


def test_another_first_loss_ends_the_run_before_an_update(tmp_path: Path) -> None:
    """Here because a hook changes the model after its weights were loaded."""
    changes: dict[str, Any] = {"checkpoint": {"load": Parts(path=prepared().reference)}, "steps": 2}
    job = preference_job(tmp_path, DPO, **changes)

    def run(job: Any) -> None:
        trainer = Trainer(job, hooks=[Disturb()], catalog=installed(), echo=lambda text: None)
        trainer.run()

    with pytest.raises(ForgeError, match=r"loss/dpo of the first step is .*, and must be 0.693147.*check_first_loss"):
        run(job)
    run(preference_job(tmp_path / "off", DPO(reference=prepared().reference, check_first_loss=False), **changes))


def test_a_model_that_starts_otherwise_than_the_reference_has_no_known_loss(tmp_path: Path) -> None:
    Trainer(preference_job(tmp_path, DPO, steps=1), catalog=installed(), echo=lambda text: None).run()


class Leaking(torch.nn.Module):
    """Adds to each position the mean of all before it, whichever document they are of."""

    def forward(self, carry: Any, batch: Any) -> Any:
        (x,) = carry if isinstance(carry, tuple) else (carry,)
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return (x + mean,) if isinstance(carry, tuple) else x + mean


@frozen(kw_only=True)
class LeakingModel(TinyModel):
    """`TinyModel` whose last layer does that."""

    def build(self, context: Any) -> Any:
        model = super().build(context)
        model.layers[str(len(model.layers))] = Leaking()
        return model


def test_a_model_in_which_documents_see_each_other_is_refused(tmp_path: Path) -> None:
    job = preference_job(tmp_path, SimPO(), model=LeakingModel(), steps=1)
    with pytest.raises(JobError, match=r"answers in a row would change each other in layers.2 of"):
        build_run(job, build_context(job, installed(), None))


@pytest.mark.parametrize(("loss", "layout"), [(KTO, "fsdp2"), (DPO, "pp2")])
def test_whole_runs_on_ranks_log_what_one_process_logs(loss: Any, layout: str, tmp_path: Path) -> None:
    """With the summary, the known first loss and the estimate of z; the reference is named by its run folder."""
    alone = logged(tmp_path / "alone", loss, {})
    changes = LAYOUTS[layout].changes(installed())
    run_on_ranks(2, lambda rank: logged(tmp_path / "ranks", loss, changes))
    assert read_steps(tmp_path / "ranks") == [pytest.approx(line, rel=1e-9, abs=1e-12) for line in alone]


def logged(folder: Path, loss: Any, changes: Any) -> list[dict[str, float]]:
    load = {"load": Parts(path=prepared().reference)}
    job = preference_job(folder, loss, steps=3, checkpoint=load, evaluations={}, **changes)
    Trainer(job, catalog=installed(), echo=lambda text: None).run()
    return read_steps(folder)


def read_steps(folder: Path) -> list[dict[str, float]]:
    """What the loss has logged."""
    [file] = folder.glob("*/metrics.jsonl")
    names = ("loss", "grad_norm")
    return [
        {
            name: value
            for name, value in json.loads(line).items()
            if name in names or name.startswith(("loss/", "re", "k"))
        }
        for line in file.read_text().splitlines()
    ]


# --- references ------------------------------------------------------------------------------------------------------


def test_log_probabilities_in_the_data_serve_as_the_reference(tmp_path: Path) -> None:
    job = preference_job(tmp_path, DPO, steps=1)
    run = build_run(job, build_context(job, installed(), None))
    reference, examples = objective_of(run.context.auxiliary).reference, []
    for row in [*run.datasets[0].rows, *run.datasets[0].held_out.rows]:
        examples += row
    stored = pair_lines()
    for example in examples:
        for name, document in zip(("chosen", "rejected"), example.documents, strict=True):
            ids, labels = (torch.from_numpy(values).long()[None] for values in document.entries())
            hidden = reference.model({"input_ids": ids})
            value = log_probabilities(reference.model.head, hidden, labels).sum().item()
            stored[example.line - 1][f"reference_{name}"] = value
    path = write_lines(tmp_path / "stored.jsonl", stored)
    data = {"tokenizer": Bytes(), "sources": (Pairs(path=path, held_out_every=5, row_examples=4),)}
    one = observe(DPO)(tmp_path, {})
    other = observe(DPO(beta=0.5))(tmp_path, {"data": data})
    assert other.losses == pytest.approx(one.losses, rel=1e-12)
    assert other.evaluation == pytest.approx(one.evaluation, rel=1e-10)


def test_fsdp_divides_the_reference(tmp_path: Path) -> None:
    prepared()  # before the ranks, which inherit it
    whole = sum(part_of_reference())
    parts = run_on_ranks(2, lambda rank: part_of_reference(LAYOUTS["fsdp2"]))
    assert [sum(part) for part in parts] == pytest.approx([whole / 2] * 2, rel=0.01)


def part_of_reference(layout: Any = None) -> list[int]:
    """Numbers of elements of the reference's parameters on this rank."""
    changes = layout.changes(installed()) if layout else {}
    with tempfile.TemporaryDirectory() as folder:
        job = preference_job(Path(folder), DPO, steps=1, **changes)
        run = build_run(job, build_context(job, installed(), None))
    parameters = objective_of(run.context.auxiliary).reference.model.parameters()
    return [getattr(p, "_local_tensor", p).numel() for p in parameters]


# --- continued runs --------------------------------------------------------------------------------------------------


def settings(loss: Any) -> Any:
    def changes() -> dict[str, Any]:
        job = preference_job(Path("."), loss, steps=6)
        return {
            **{name: getattr(job, name) for name in ("model", "loss")},
            "evaluations": {},
            "data": {"tokenizer": job.data.tokenizer, "sources": job.data.sources},
            **{name: getattr(job.train, name) for name in ("precision", "global_batch_size", "seq_len")},
        }

    return changes


test_resumption = resumption_law(Interrupted("dpo", changes=settings(DPO)), Interrupted("kto", changes=settings(KTO)))


def test_another_checkpoint_of_the_reference_is_refused(tmp_path: Path) -> None:
    hook = SameReference(reference=prepared().reference)
    hook.on_train_begin(None)  # type: ignore[arg-type]
    state = hook.state_dict()
    again = SameReference(reference=prepared().reference)
    again.load_state_dict(state | {"checkpoint": str(tmp_path / "older")})
    with pytest.raises(ForgeError, match=r"was .*older when this run began, and is .*--resume-with-changes"):
        again.on_train_begin(None)  # type: ignore[arg-type]
