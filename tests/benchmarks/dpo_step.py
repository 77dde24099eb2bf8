"""A step of DPO, side by side: Forge and TRL's DPOTrainer, with a reference model beside the one in training.

    python tests/benchmarks/dpo_step.py --engines trl_dpo forge_dpo --vocab 32000 --dtype bf16 --rounds 2

The same Llama and pairs of random words, each a prompt of a quarter of `--seq` with two answers of three quarters, one
pair a row (`--batch` pairs a step), AdamW, clipping at 1.0. TRL computes both answers of a pair as two rows.
`step_time.py` has the options.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import step_time


def pairs_of(options) -> list[dict[str, str]]:
    """Pairs of texts whose words are tokens."""
    draw = random.Random(1)

    def words(count: int) -> str:
        return " ".join(f"t{draw.randrange(3, options.vocab)}" for _ in range(count))

    prompt, answer = options.seq // 4, options.seq - options.seq // 4 - 1
    return [
        {"prompt": words(prompt), "chosen": " " + words(answer), "rejected": " " + words(answer)}
        for _ in range(options.steps * options.batch)
    ]


def tokenizer_of(options):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unknown>": 0, "<end>": 1, "<pad>": 2, **{f"t{number}": number for number in range(3, options.vocab)}}
    own = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    own.pre_tokenizer, own.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="")
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>", pad_token="<pad>")


def trl_dpo(options, meter) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_NO_ADVISORY_WARNINGS="1", TOKENIZERS_PARALLELISM="false")
    from datasets import Dataset
    from hf_trainer import model_of, settings, ticks
    from trl import DPOConfig, DPOTrainer

    folder = tempfile.mkdtemp()
    model, reference = model_of(options), model_of(options)
    reference.load_state_dict(model.state_dict())
    config = DPOConfig(**settings(options, step_time.CLIP, folder), max_length=2 * options.seq)
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=config,
        train_dataset=Dataset.from_list(pairs_of(options)),
        processing_class=tokenizer_of(options),
        callbacks=[ticks(meter.tick)],
    )
    result = trainer.train()
    meter.report("trl_dpo", result.training_loss, sum(p.numel() for p in model.parameters()))


def base_job(options, folder: str, steps: int, name: str) -> str:
    return f"""
[job]
name = "{name}"
output = "{folder}"
[train]
steps = {steps}
global_batch_size = {options.batch}
seq_len = {2 * options.seq}
precision = "{options.dtype}"
grad_clip_norm = {step_time.CLIP}
[model]
type = "transformer"
dim = {options.dim}
layers = {options.layers}
[model.attention]
heads = {options.heads}
kv_heads = {options.kv}
[model.ffn]
hidden = {options.hidden}
[data.tokenizer]
type = "auto"
path = "{folder}/tokenizer"
spelled_tokens = "warn"
[optimizer]
type = "adamw"
lr = {options.lr}
weight_decay = {options.wd}
[checkpoint.storage]
folder = "checkpoints"
[plugins.cpu_products]
"""


def forge_dpo(options, meter) -> None:
    folder = tempfile.mkdtemp()
    tokenizer_of(options).save_pretrained(f"{folder}/tokenizer")
    rows = pairs_of(options)
    Path(f"{folder}/pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = "".join(json.dumps({"text": row["prompt"] + row["chosen"]}) + "\n" for row in rows)
    Path(f"{folder}/texts.jsonl").write_text(texts * 8)
    text = f'[[data.sources]]\ntype = "text"\npath = "{folder}/texts.jsonl"\n'
    start = Path(folder) / "start.toml"
    start.write_text(base_job(options, folder, 1, "start") + text)
    # Apart, so that its memory is not that of the step that is measured
    subprocess.run([sys.executable, "-m", "forge_core", str(start)], check=True, stdout=subprocess.DEVNULL)

    def dpo_job(options, _folder: str) -> str:
        pairs = f'[[data.sources]]\ntype = "pairs"\npath = "{folder}/pairs.jsonl"\npacked = false\n'
        loss = f'[loss]\ntype = "dpo"\nreference = "{folder}/start"\n'
        load = f'[checkpoint.load]\npath = "{folder}/start"\n'
        return base_job(options, folder, options.steps, "dpo") + pairs + loss + load

    step_time.train_job(options, meter, dpo_job, overrides=[f"--{o}" for o in options.set])


if __name__ == "__main__":
    step_time.ENGINES.update(forge_dpo=forge_dpo, trl_dpo=trl_dpo)
    options = step_time.arguments()
    if options.engine is None:
        step_time.compare(options, __file__, reference="trl_dpo")
        sys.exit()
    step_time.run_here(options)
