"""CPU and wall time a step of a vision-language model: Forge, and transformers' LlavaForConditionalGeneration.

    python tests/benchmarks/llava.py --rounds 3
    python tests/benchmarks/llava.py --engine forge       # one engine, one JSON line

A CLIP tower (features of the block before the last), two matrices between, a Llama; rows of an image, a question and an
answer, all of one length, so that nobody pads. `loop` is a plain training loop, `trainer` Hugging Face's Trainer. All
train everything with AdamW and clip at 1.0. Engines run in turn, each in a process of its own; see `step_time.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

import step_time

HERE = Path(__file__).resolve().parent
CLIP, ROWS = 1.0, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["loop", "forge", "trainer"], choices=sorted(ENGINES))
    parser.add_argument("--engine", choices=sorted(ENGINES), help="run only this one, here, and print its JSON line")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    sizes = {"steps": 14, "warm": 4, "threads": 2, "batch": 4, "seq": 256, "answer": 64, "seed": 0}
    sizes |= {"dim": 256, "layers": 6, "heads": 8, "kv": 4, "hidden": 768, "vocab": 8192}
    sizes |= {"tower_dim": 192, "tower_layers": 5, "tower_heads": 4, "patch": 14, "side": 168}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser.parse_args()


def forge(options: argparse.Namespace, meter: step_time.Meter) -> None:
    step_time.train_job(options, meter, job_text)


def job_text(options: argparse.Namespace, folder: str) -> str:
    return f"""
[job]
output = "{folder}"
[train]
steps = {options.steps}
global_batch_size = {options.batch}
seq_len = {options.seq}
precision = "{options.dtype}"
grad_clip_norm = {CLIP}
[model]
type = "vision_language"
[model.language]
dim = {options.dim}
layers = {options.layers}
vocab_size = {options.vocab}
[model.language.attention]
heads = {options.heads}
kv_heads = {options.kv}
[model.language.ffn]
hidden = {options.hidden}
[model.vision.encoder]
type = "vit"
dim = {options.tower_dim}
layers = {options.tower_layers}
heads = {options.tower_heads}
patch = {options.patch}
size = [{options.side}, {options.side}]
class_token = true
pre_norm = true
patch_bias = false
activation = "quick_gelu"
norm = false
select_layer = -2
[[data.sources]]
type = "{HERE}/image_rows.py:ImageRows"
vocab_size = {options.vocab}
sequences = {ROWS * options.batch}
answer = {options.answer}
[loss]
type = "chunked_cross_entropy"
[optimizer]
type = "adamw"
lr = {options.lr}
weight_decay = 0.1
[plugins.cpu_products]
"""


def llava(options: argparse.Namespace):
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    tower = CLIPVisionConfig(
        hidden_size=options.tower_dim,
        intermediate_size=4 * options.tower_dim,
        num_hidden_layers=options.tower_layers,
        num_attention_heads=options.tower_heads,
        image_size=options.side,
        patch_size=options.patch,
        attn_implementation="sdpa",
    )
    language = LlamaConfig(
        vocab_size=options.vocab + 1,
        hidden_size=options.dim,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv,
        intermediate_size=options.hidden,
        use_cache=False,
        attn_implementation="sdpa",
    )
    config = LlavaConfig(vision_config=tower, text_config=language, image_token_index=options.vocab)
    return LlavaForConditionalGeneration(config)


def rows(options: argparse.Namespace):
    """Rows as LLaVA takes them; it shifts labels itself."""
    import torch

    generator, patches = torch.Generator().manual_seed(1), (options.side // options.patch) ** 2
    made = []
    for _ in range(ROWS * options.batch):
        ids = torch.randint(0, options.vocab, (options.seq,), generator=generator)
        ids[:patches] = options.vocab
        labels = ids.clone()
        labels[: options.seq - options.answer] = -100
        pixels = torch.randn(3, options.side, options.side, generator=generator)
        made.append({"input_ids": ids, "labels": labels, "pixel_values": pixels})
    return made


def loop(options: argparse.Namespace, meter: step_time.Meter) -> None:
    import torch

    model, samples = llava(options), rows(options)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, (0.9, 0.95), weight_decay=0.1, fused=True)
    loss = torch.zeros(())
    for step in range(options.steps):
        start = step % ROWS * options.batch
        part = samples[start : start + options.batch]
        batch = {name: torch.stack([row[name] for row in part]) for name in part[0]}
        with torch.autocast("cpu", torch.bfloat16, options.dtype == "bf16"):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.tick()
    meter.report("loop", loss.item(), sum(p.numel() for p in model.parameters()))


def trainer(options: argparse.Namespace, meter: step_time.Meter) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            meter.tick()

    arguments_ = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.lr,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=options.dtype == "bf16",
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = llava(options)
    with contextlib.redirect_stdout(io.StringIO()):
        done = Trainer(model, arguments_, train_dataset=rows(options), callbacks=[Ticks()]).train()
    meter.report("trainer", done.training_loss, sum(p.numel() for p in model.parameters()))


ENGINES = {"forge": forge, "loop": loop, "trainer": trainer}


def main() -> None:
    options = arguments()
    if options.engine is None:
        step_time.compare(options, __file__, "loop")
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    sys.path.insert(0, str(HERE))
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    ENGINES[options.engine](options, step_time.Meter(options))


if __name__ == "__main__":
    main()
