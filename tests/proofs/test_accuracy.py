"""`accuracy.py`: against logits looked at directly; under every layout."""

from __future__ import annotations

import pytest
import torch

from forge_core import Trainer
from forge_core.cli import main
from forge_plugin_losses.teacher import load_trained
from forge_testing.processes import run_on_ranks

ACCURACY = """
train = { precision = "fp64", micro_batch_size = 2 }
eval.interval = 2

[model]
type = "transformer"
dim = 16
layers = 2
vocab_size = 32
attention.heads = 2

[optimizer]
lr = 3e-2

[[data.sources]]
type = "forge_testing:Numbers"
held_out = 21

[evaluations.accuracy]
type = "PROOFS/accuracy.py:Accuracy"
"""
LAYOUTS = {"replicate": "", "fsdp": "", "tp": "degree = 2", "pp": "degree = 2", "cp": "degree = 2"}


@pytest.mark.parametrize("top", [1, 4])
def test_a_run_logs_the_share_of_right_guesses(top, job_files, records, run_folder, job_of, build):
    text = f"{ACCURACY}top = {top}\n"
    assert main(job_files("one", text)) == 0
    run = build(job_of("one", text))
    model = load_trained(run_folder("one"), run.context).model
    right = total = 0
    for row in (run.held_out[number] for number in range(21)):
        ids, labels = (torch.from_numpy(row[key]) for key in ("input_ids", "labels"))
        likeliest = model.head.logits(model({"input_ids": ids[None]}))[0].topk(top).indices
        right += sum(int(label in guesses) for label, guesses in zip(labels, likeliest, strict=True) if label != -100)
        total += (labels != -100).sum().item()
    found = records("one", "eval/accuracy")
    assert len(found) == 2  # after steps 2 and 4
    assert found[-1] == right / total
    assert 0 < found[-1] < 1


def test_every_layout_guesses_like_one_process(job_of, train, catalog):
    """With an average of the weights, which is there for evaluations only."""
    text = f"{ACCURACY}[plugins.ema]\ndecay = 0.5\n"
    expected = train(job_of("one", text)).evaluation["eval/accuracy"]
    jobs = [job_of(name, f"{text}[parallel.{name}]\n{keys}\n", ranks=2) for name, keys in LAYOUTS.items()]

    def evaluated(rank):
        return [Trainer(job, catalog=catalog, echo=lambda text: None).run().evaluation for job in jobs]

    for found in run_on_ranks(2, evaluated):
        assert {name: metrics["eval/accuracy"] for name, metrics in zip(LAYOUTS, found, strict=True)} == dict.fromkeys(
            LAYOUTS, expected
        )
