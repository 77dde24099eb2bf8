"""`distillation`: against a float64 reference, in whole runs with a teacher from another run, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from forge_core.auxiliary import Auxiliary
from forge_core.cli import main
from forge_core.contracts.errors import CheckpointError, ForgeError
from forge_core.contracts.layout import Layout
from forge_core.engine.build import build_context
from forge_core.engine.trainer import Trainer
from forge_core.parallel.stages import Replicate
from forge_kit.nn.modules import LinearHead
from forge_kit.tools.checkpoints import stored_tensors
from forge_plugin_losses import ChunkedCrossEntropy, Distillation
from forge_plugin_losses.distillation import distillation_loss
from forge_plugin_losses.teacher import find_trained, load_trained
from forge_plugin_parallel import FSDP
from forge_plugin_plan.estimate import make_plan
from forge_plugin_plan.storages import Purpose
from forge_plugin_transformer import Transformer
from forge_testing import TinyModel, tiny_job
from forge_testing.processes import run_on_ranks
from forge_testing.refusals import lacks, naming, refuses

BATCH, SEQUENCE, DIM, VOCAB = 3, 7, 16, 50


class CappedHead(LinearHead):
    """Not linear: soft-capped logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        return 5 * torch.tanh(super().logits(hidden) / 5)


class Teacher:
    """Hidden states by embedding of the ids."""

    def __init__(self, dtype: torch.dtype = torch.float64, vocabulary: int = VOCAB) -> None:
        torch.manual_seed(5)
        self.table = torch.randn(VOCAB, 9, dtype=torch.float64).to(dtype)
        self.head = LinearHead(9, vocabulary).to(dtype)
        torch.nn.init.normal_(self.head.weight)
        self.calls = 0

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return self.table[batch["input_ids"]]


def make_loss(teacher: Teacher, chunk_tokens: int = 4, auxiliary: Any = None, **settings: float) -> Any:
    plain = lambda head, hidden, batch: pytest.fail("this is for evaluations")  # noqa: E731
    auxiliary = auxiliary or Auxiliary(torch.device("cpu"))
    return distillation_loss(teacher, plain, chunk_tokens, auxiliary, **{"weight": 0.3, "temperature": 1.0} | settings)


def make_inputs(kind: type[LinearHead] = LinearHead) -> tuple[LinearHead, Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    head = kind(DIM, VOCAB, bias=True).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    ids = torch.randint(0, VOCAB, (2, BATCH, SEQUENCE))
    labels = ids[1].masked_fill(torch.rand(BATCH, SEQUENCE) < 0.3, -100)
    hidden = torch.randn(BATCH, SEQUENCE, DIM, dtype=torch.float64, requires_grad=True)
    return head, hidden, {"input_ids": ids[0], "labels": labels}


def reference(
    logits: Tensor,
    taught: Tensor,
    labels: Tensor,
    weight: float = 0.3,
    temperature: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The objective, and the divergence alone, by torch's own functions."""
    valid = labels != -100
    logits, taught, labels = logits[valid], taught[valid], labels[valid]
    hard = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    hard = hard + z_loss * logits.logsumexp(-1).square().sum()
    q, p = (logits / temperature).log_softmax(-1), (taught / temperature).log_softmax(-1)
    soft = temperature**2 * F.kl_div(q, p, reduction="sum", log_target=True)
    return (1 - weight) * hard + weight * soft, soft


SETTINGS = [
    {},
    {"weight": 1.0},
    {"weight": 0.0, "temperature": 2.0},
    {"temperature": 3.0, "label_smoothing": 0.1, "z_loss": 1e-2},
]


@pytest.mark.parametrize("kind", [LinearHead, CappedHead])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_value_and_gradients_equal_the_float64_reference(kind, settings, chunk_tokens):
    (head, hidden, batch), teacher, auxiliary = make_inputs(kind), Teacher(), Auxiliary(torch.device("cpu"))
    auxiliary.begin_step((batch["labels"] != -100).sum(), sequences=BATCH, micro_batches=1)
    output = make_loss(teacher, chunk_tokens, auxiliary, **settings)(head, hidden, batch)
    with head.whole():
        logits = head.logits(hidden)
    expected, soft = reference(logits, teacher.head(teacher(batch)).detach(), batch["labels"], **settings)
    torch.testing.assert_close(output.sum, expected, rtol=1e-12, atol=1e-12)
    inputs = (hidden, *head.parameters())
    found = torch.autograd.grad(output.sum / 3, inputs)
    torch.testing.assert_close(found, torch.autograd.grad(expected / 3, inputs), rtol=1e-9, atol=1e-12)
    assert auxiliary.totals()["loss/distillation"].item() == pytest.approx(soft.item() / output.count.item())
    assert output.per_sequence[0].sum().item() == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").item()
    )


def test_in_bfloat16_it_stays_close():
    (head, hidden, batch), teacher = make_inputs(), Teacher(torch.bfloat16)
    narrow = hidden.detach().bfloat16().requires_grad_()
    head.float()
    output = make_loss(teacher, temperature=2.0)(head, narrow, batch)
    exact = narrow.detach().double().requires_grad_()
    weights = [parameter.detach().bfloat16().double() for parameter in (head.weight, head.bias)]
    taught = teacher.head(teacher(batch)).detach().double()
    expected, _ = reference(F.linear(exact, *weights), taught, batch["labels"], temperature=2.0)
    assert output.sum.dtype == torch.float32
    assert output.sum.item() == pytest.approx(expected.item(), rel=1e-3)
    (found,), (wanted,) = torch.autograd.grad(output.sum, narrow), torch.autograd.grad(expected, exact)
    assert (found.double() - wanted).norm() < 1e-2 * wanted.norm()


def test_all_labels_ignored_gives_exact_zeros():
    head, hidden, batch = make_inputs()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    output = make_loss(Teacher())(head, hidden, batch)
    assert output.sum == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(output.sum, (hidden, head.weight)))


def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it():
    (_, _, batch), teacher = make_inputs(), Teacher()
    hidden = teacher(batch).detach().requires_grad_()
    output = make_loss(teacher, weight=1.0, temperature=2.0)(teacher.head, hidden, batch)
    (gradient,) = torch.autograd.grad(output.sum, hidden)
    assert output.sum.item() == pytest.approx(0, abs=1e-12)
    assert gradient.abs().max() < 1e-12


def test_evaluations_do_not_run_the_teacher():
    (head, hidden, batch), teacher = make_inputs(), Teacher()
    loss = distillation_loss(teacher, lambda *inputs: "plain", 4, None, weight=0.5, temperature=1.0)
    with torch.no_grad():
        assert loss(head, hidden, batch) == "plain"
    assert teacher.calls == 0


def test_another_vocabulary_is_refused():
    head, hidden, batch = make_inputs()
    with pytest.raises(ForgeError, match=naming("60 words", 50)):
        make_loss(Teacher(vocabulary=60))(head, hidden, batch)


# --- in whole runs --------------------------------------------------------------------------------------------------

JOB = """
[job]
name = "{name}"
output = "{output}"
[train]
steps = 6
global_batch_size = 4
seq_len = 8
precision = "fp64"
device = "cpu"
[checkpoint]
interval = 2
[model]
type = "forge_testing:TinyModel"
layers = {layers}
dropout = {dropout}
[optimizer]
type = "forge_testing:TinyAdamW"
lr = 0.03
[[data.sources]]
type = "forge_testing:Numbers"
"""
LOSS = """
[loss]
type = "distillation"
teacher = "{teacher}"
weight = 0.9
temperature = 2.0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs: `teacher`, of six steps."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "teacher.toml").write_text(JOB.format(name="teacher", output=folder, layers=3, dropout=0.1))
    assert main([str(folder / "teacher.toml")]) == 0
    return folder


def distil(folder: Path, name: str, *arguments: str, teacher: str = "teacher/checkpoints/step-6") -> int:
    text = JOB.format(name=name, output=folder, layers=1, dropout=0.0)
    (folder / f"{name}.toml").write_text(text + LOSS.format(teacher=folder / teacher))
    return main([str(folder / f"{name}.toml"), *arguments])


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [record for record in read if "loss" in record]


def numbers(folder: Path, name: str) -> list[tuple[float, ...]]:
    keys = ("loss", "loss/distillation", "grad_norm")
    return [tuple(record[key] for key in keys) for record in records(folder, name)]


@pytest.fixture(scope="module")
def student(folder):
    assert distil(folder, "student") == 0
    return numbers(folder, "student")


def test_the_student_comes_closer_to_the_teacher(student):
    assert student[-1][1] < 0.8 * student[0][1]


@pytest.mark.parametrize("teacher", ["teacher", "teacher.toml"])
def test_a_run_folder_and_a_job_file_mean_the_newest_checkpoint(folder, student, teacher):
    name = f"by-{teacher.replace('.', '-')}"
    assert distil(folder, name, teacher=teacher) == 0
    assert numbers(folder, name) == student


def test_the_teacher_is_not_in_the_checkpoint_and_the_run_resumes_bit_for_bit(folder, student):
    names = [name for name in stored_tensors(folder / "student/checkpoints/step-6") if name.startswith("model.")]
    assert not [name for name in names if "layers.1" in name]  # the student has one layer, the teacher three
    assert distil(folder, "cut") == 0
    for step in (4, 6):
        shutil.rmtree(folder / f"cut/checkpoints/step-{step}")
    assert distil(folder, "cut") == 0
    assert numbers(folder, "cut") == student


def test_the_optimizer_of_the_teacher_need_not_be_installed(folder, student):
    shutil.copytree(folder / "teacher", folder / "stranger")
    manifest = folder / "stranger/checkpoints/step-6/manifest.json"
    text = manifest.read_text()
    assert "forge_testing.tiny:TinyAdamW" in text
    manifest.write_text(text.replace("forge_testing.tiny:TinyAdamW", "forge-plugin-nowhere/nobody"))
    assert distil(folder, "of-a-stranger", teacher="stranger/checkpoints/step-6") == 0
    assert numbers(folder, "of-a-stranger") == student


def test_a_run_does_not_go_on_with_a_newer_teacher(folder, capsys):
    shutil.copytree(folder / "teacher", folder / "growing")
    shutil.rmtree(folder / "growing/checkpoints/step-6")
    assert distil(folder, "taught", "--train.steps=4", teacher="growing") == 0
    shutil.copytree(folder / "teacher/checkpoints/step-6", folder / "growing/checkpoints/step-6")
    capsys.readouterr()
    assert distil(folder, "taught", teacher="growing") == 1
    told = capsys.readouterr().err
    assert not lacks(told, "growing/checkpoints/step-4", "growing/checkpoints/step-6")
    pinned = [f"--loss.teacher={folder / 'growing/checkpoints/step-4'}", "--resume-with-changes"]
    assert distil(folder, "taught", *pinned, teacher="growing") == 0


LAYOUTS = {"replicate": {"replicate": Replicate()}, "fsdp": {"fsdp": FSDP()}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_curve_does_not_depend_on_the_layout(folder, student, layout):
    loss = Distillation(teacher=str(folder / "teacher"), weight=0.9, temperature=2.0)
    optimizer = attrs.evolve(tiny_job(str(folder)).optimizer, lr=0.03)
    settings = {"steps": 6, "precision": "fp64", "loss": loss, "model": TinyModel(layers=1), "optimizer": optimizer}

    def train(rank):
        job = tiny_job(str(folder), job={"name": layout}, parallel=LAYOUTS[layout], **settings)
        Trainer(job, echo=lambda text: None).run()

    run_on_ranks(2, train)
    assert numbers(folder, layout) == [pytest.approx(line, rel=1e-9) for line in student]


def test_the_plan_counts_the_teacher(folder, make_job, catalog):
    if dist.is_initialized():  # by a run of a test before this one
        dist.destroy_process_group()

    def memory(loss):
        return make_plan(make_job(precision="fp64", loss=loss), catalog, 2).ranks[0].memory

    stored = stored_tensors(folder / "teacher/checkpoints/step-6").items()
    size = sum(8 * shape.numel() for name, (shape, _) in stored if name.startswith("model."))
    with_teacher, without = memory(Distillation(teacher=str(folder / "teacher"))), memory(ChunkedCrossEntropy())
    assert (with_teacher.at_peak[Purpose.BESIDE], without.at_peak[Purpose.BESIDE]) == (size, 0)
    assert with_teacher.peak > without.peak + size


def test_a_teacher_computes_in_the_dtype_of_the_run_and_is_frozen(folder, catalog):
    job = tiny_job(str(folder), precision="bf16")
    context = build_context(job, catalog, None)
    teacher = load_trained(folder / "teacher", context)
    dtypes = {name: parameter.dtype for name, parameter in teacher.model.named_parameters()}
    assert {dtypes["head.weight"], dtypes["embedding.weight"]} == {torch.bfloat16}
    assert dtypes["norm.weight"] == torch.float32
    assert not teacher.model.training
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())
    batch = {"input_ids": torch.arange(8)[None]}
    torch.testing.assert_close(teacher.model(batch), teacher.model(batch), rtol=0, atol=0)
    assert teacher.model(batch).dtype == torch.bfloat16


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dimension", "what"), [("tp", "vocabulary"), ("pp", "layers"), ("cp", "sequences")])
def test_layouts_that_split_what_a_teacher_needs_whole(folder, make_job, dimension, what):
    loss = Distillation(teacher=str(folder / "teacher"))
    [problem] = loss.problems(make_job(), Layout(**{dimension: 2}))
    expected = f"a teacher needs whole {what}, which parallel.{dimension} splits; use replicate or fsdp"
    assert str(problem) == f"teacher: {expected}"


def test_a_teacher_that_is_not_there(folder, capsys):
    assert distil(folder, "orphan", teacher="nowhere") == 2
    assert not lacks(capsys.readouterr().err, "loss.teacher", "nowhere")


def test_a_job_file_that_never_ran(folder, tmp_path):
    (tmp_path / "job.toml").write_text(JOB.format(name="never", output=tmp_path, layers=1, dropout=0.0))
    with pytest.raises(CheckpointError, match=naming("never", "run folder")):
        load_trained(tmp_path / "job.toml", SimpleNamespace())


@pytest.mark.parametrize("content", [None, b"[job", b"\xff", b"job = 3", b"[job]\nname = 3"])
def test_a_job_file_that_is_none(tmp_path, content):
    path = tmp_path / "job.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=naming(path, "job file")):
        find_trained(path)


def test_a_student_with_more_words_than_the_teacher(folder, make_job, train):
    job = make_job(loss=Distillation(teacher=str(folder / "teacher")), model=Transformer(vocab_size=40, dim=16))
    with pytest.raises(ForgeError, match=naming("32 words", 40)):
        train(job)


def test_a_student_with_another_tokenizer(folder, make_job, catalog):
    trained = folder / "tokenised"
    shutil.copytree(folder / "teacher", trained)
    manifest = trained / "checkpoints/step-6/manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"tokenizer": null', '"tokenizer": "theirs"'))
    assert manifest.read_text() != text
    context = build_context(make_job(), catalog, None)
    context = attrs.evolve(context, tokenizer=SimpleNamespace(fingerprint=lambda: "ours"))
    with refuses("loss.teacher", "step-6", "tokenizer"):
        Distillation(teacher=str(trained)).build(context)


@pytest.mark.parametrize("wrong", [{"weight": 1.5}, {"temperature": 0.0}])
def test_values_out_of_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Distillation(teacher="runs/base", **wrong)
