"""A step of supervised fine-tuning, side by side: Forge and TRL's SFTTrainer, both with packed rows.

    python tests/benchmarks/sft_step.py --engines trl_sft forge_sft --dtype bf16 --rounds 3
    python tests/benchmarks/sft_step.py --losses --seq 256 --batch 2 --dim 128 --layers 2 --vocab 2048

The same Llama and prompts with completions of random words, between an eighth and three eighths of `--seq` long, which
both pack by best fit; completions alone are learned, AdamW, clipping at 1.0. `--losses` compares the first step's loss
in float32 with the mean over the same rows in float64, each computed alone. `step_time.py` has the other options.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path

import step_time
from dpo_step import tokenizer_of

ROWS = 4
"""Rows of text in a packed one, on average."""
SOURCE = """
[[data.sources]]
type = "huggingface"
path = "json"
data_files = "{folder}/rows.jsonl"
prompt = "prompt"
completion = "completion"
[data.packing]
type = "best_fit"
"""


def rows_of(options, alike: bool = False) -> list[dict[str, str]]:
    """Prompts with completions whose words are tokens; `alike`: of one length, so that packed rows have no order."""
    draw = random.Random(1)

    def words(count: int) -> str:
        return " ".join(f"t{draw.randrange(3, options.vocab)}" for _ in range(count))

    rows = []
    # One more in ten than steps need: the last packed rows may be short
    for _ in range(options.steps * options.batch * ROWS * (10 if alike else 11) // 10):
        size = options.seq // ROWS if alike else draw.randint(options.seq // 8, 3 * options.seq // 8)
        rows.append({"prompt": words(size // 4), "completion": " " + words(size - size // 4 - 1)})
    return rows


def sft_trainer(options, model, rows, **further):
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_NO_ADVISORY_WARNINGS="1", TOKENIZERS_PARALLELISM="false")
    from datasets import Dataset
    from hf_trainer import settings
    from trl import SFTConfig, SFTTrainer

    settings = settings(options, step_time.CLIP, tempfile.mkdtemp())
    return SFTTrainer(
        model=model,
        args=SFTConfig(**settings, max_length=options.seq, packing=True),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer_of(options),
        **further,
    )


def trl_sft(options, meter) -> None:
    from hf_trainer import model_of, ticks

    model = model_of(options)
    result = sft_trainer(options, model, rows_of(options), callbacks=[ticks(meter.tick)]).train()
    meter.report("trl_sft", result.training_loss, sum(p.numel() for p in model.parameters()))


def sft_job(options, folder: str) -> str:
    tokenizer_of(options).save_pretrained(f"{folder}/tokenizer")
    write_rows(rows_of(options), folder)
    head, tail = step_time.job_text(options, folder).split("[[data.sources]]")
    tokenizer = f'[data.tokenizer]\ntype = "auto"\npath = "{folder}/tokenizer"\nspelled_tokens = "warn"\n'
    return head + tokenizer + SOURCE.format(folder=folder) + tail[tail.index("[loss]") :]


def write_rows(rows, folder: str) -> None:
    Path(f"{folder}/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def forge_sft(options, meter) -> None:
    step_time.train_job(options, meter, sft_job, overrides=[f"--{o}" for o in options.set])


# --- losses ----------------------------------------------------------------------------------------------------------


def compare_losses(options) -> None:
    """Print the loss of a first step on the same rows from the same weights."""
    import torch
    from hf_trainer import model_of
    from transformers import LlamaForCausalLM

    folder = tempfile.mkdtemp()
    options.steps, options.dtype = 1, "fp32"
    rows, tokenizer = rows_of(options, alike=True), tokenizer_of(options)
    torch.manual_seed(0)
    model = model_of(options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)  # far from uniform predictions, whose loss would hardly depend on the rows
    model.save_pretrained(f"{folder}/published")
    tokenizer.save_pretrained(f"{folder}/published")
    print(f"float64, each row alone   {mean_alone(model.double(), tokenizer, rows):.9f}")
    fresh = LlamaForCausalLM.from_pretrained(f"{folder}/published", attn_implementation="sdpa", dtype=torch.float32)
    print(f"TRL, packed               {sft_trainer(options, fresh, rows).train().training_loss:.9f}")
    print(f"Forge, packed             {forge_loss(options, rows, folder):.9f}")


def mean_alone(model, tokenizer, rows) -> float:
    import torch

    total, count = 0.0, 0
    for row in rows:
        prompt, answer = (tokenizer(row[key])["input_ids"] for key in ("prompt", "completion"))
        ids = torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]])
        with torch.no_grad():
            log_p = model(ids).logits[0, :-1].log_softmax(-1)
        learned = log_p.gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
        total, count = total - learned.sum().item(), count + len(learned)
    return total / count


def forge_loss(options, rows, folder: str) -> float:
    from forge_core.cli import main
    from forge_kit.tools.metrics import read_metrics

    write_rows(rows, folder)
    job = Path(folder) / "sft.toml"
    settings = f'[train]\nsteps = 1\nglobal_batch_size = {options.batch}\nseq_len = {options.seq}\nprecision = "fp32"\n'
    optimizer = f'[optimizer]\ntype = "adamw"\nlr = {options.lr}\n'
    job.write_text(f'[job]\nname = "sft"\noutput = "{folder}"\n{settings}{optimizer}{SOURCE.format(folder=folder)}')
    assert main(["weights", "import", f"{folder}/published", "--out", f"{folder}/imported"]) == 0
    assert main(["run", f"{folder}/imported/start.toml", str(job), "--data.tokenizer.spelled_tokens=warn"]) == 0
    return next(row["loss"] for row in read_metrics(Path(folder) / "sft") if "loss" in row)


if __name__ == "__main__":
    if losses := "--losses" in sys.argv:
        sys.argv.remove("--losses")
    step_time.ENGINES.update(forge_sft=forge_sft, trl_sft=trl_sft)
    options = step_time.arguments()
    if losses:
        compare_losses(options)
        sys.exit()
    if options.engine is None:
        step_time.compare(options, __file__, reference="trl_sft")
        sys.exit()
    step_time.run_here(options)
