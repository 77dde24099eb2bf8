"""A step with LoRA, side by side: Forge, Hugging Face's Trainer with peft, and TRL's SFTTrainer with peft.

    python tests/benchmarks/lora_step.py --engines hf_lora trl_lora forge_lora --dtype bf16 --rounds 2

The same Llama, random tokens in full rows, rank 16 beside all matrices of the layers, AdamW on the adapters alone, and
clipping at 1.0, as in `step_time.py`, which has the options. Base weights are float32 on all sides.
"""

from __future__ import annotations

import os
import sys
import tempfile

import step_time

RANK = 16


def lora_job(options, folder: str) -> str:
    lora = f"[plugins.lora]\nrank = {RANK}\nalpha = {2 * RANK}\nrandom_base = true\n"
    return step_time.job_text(options, folder) + lora


def forge_lora(options, meter) -> None:
    step_time.train_job(options, meter, lora_job, overrides=[f"--{o}" for o in options.set])


def adapted_model(options):
    import peft
    from hf_trainer import model_of

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="CAUSAL_LM")
    return peft.get_peft_model(model_of(options), config)


def hf_lora(options, meter) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_NO_ADVISORY_WARNINGS="1", TOKENIZERS_PARALLELISM="false")
    from hf_trainer import train

    loss, params = train(options, step_time.token_batches(options), meter.tick, step_time.CLIP, adapted_model(options))
    meter.report("hf_lora", loss, params)


def trl_lora(options, meter) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_NO_ADVISORY_WARNINGS="1", TOKENIZERS_PARALLELISM="false")
    from datasets import Dataset
    from hf_trainer import settings, ticks
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    rows = [row[:-1].tolist() for batch in step_time.token_batches(options) for row in batch]
    count = options.steps * options.batch
    data = Dataset.from_dict({"input_ids": [rows[index % len(rows)] for index in range(count)]})
    words = {f"t{number}": number for number in range(options.vocab)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), eos_token="t1", pad_token="t2"
    )
    config = SFTConfig(**settings(options, step_time.CLIP, tempfile.mkdtemp()), max_length=options.seq)
    trainer = SFTTrainer(
        model=adapted_model(options),
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[ticks(meter.tick)],
    )
    result = trainer.train()
    meter.report("trl_lora", result.training_loss, sum(p.numel() for p in trainer.model.parameters()))


if __name__ == "__main__":
    step_time.ENGINES.update(forge_lora=forge_lora, hf_lora=hf_lora, trl_lora=trl_lora)
    options = step_time.arguments()
    if options.engine is None:
        step_time.compare(options, __file__, reference="hf_lora")
        sys.exit()
    step_time.run_here(options)
