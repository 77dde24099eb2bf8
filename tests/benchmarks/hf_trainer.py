"""Hugging Face's Trainer with LlamaForCausalLM, on the same work."""

from __future__ import annotations

import contextlib
import io
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """Sequences in turn. The model shifts the labels itself, so the last position is not trained on."""

    def __init__(self, batches, length):
        self.rows = [row for batch in batches for row in batch]
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        row = self.rows[index % len(self.rows)][:-1]
        return {"input_ids": row, "labels": row}


def ticks(tick):
    """Returns a callback that calls `tick` after each step."""

    class Ticks(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            tick()

    return Ticks()


def model_of(options):
    """Returns a Llama of the sizes in the options."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocab,
            hidden_size=options.dim,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv,
            intermediate_size=options.hidden,
            max_position_embeddings=options.seq,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def settings(options, clip, folder):
    """Returns the arguments of `TrainingArguments` that the work fixes."""
    return {
        "output_dir": folder,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "learning_rate": options.lr,
        "weight_decay": options.wd,
        "adam_beta2": 0.95,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": options.dtype == "bf16",
        "use_cpu": True,
        "torch_compile": options.compile,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "max_grad_norm": clip,
    }


def train(options, batches, tick, clip, model=None):
    """Returns the mean loss over all steps and the number of parameters; of a model of the options by default."""
    model = model or model_of(options)
    arguments = TrainingArguments(**settings(options, clip, tempfile.mkdtemp()))
    rows = Rows(batches, options.steps * options.batch)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[ticks(tick)])
    with contextlib.redirect_stdout(io.StringIO()):
        result = trainer.train()
    return result.training_loss, sum(p.numel() for p in model.parameters())
