"""CPU and wall time a step of Qwen2.5-VL: Forge, and transformers' Qwen2_5_VLForConditionalGeneration.

    python tests/benchmarks/qwen_vl_step.py --rounds 3
    python tests/benchmarks/qwen_vl_step.py --engine forge --weights FOLDER       # one engine, one JSON line

A clip, an image, a question and an answer a row, all of one length, so that nobody pads. Both begin with the same
weights (`forge-run weights import`) and see the same frames, so their losses after the last step must be equal; each
step has the same rows. `loop` is a plain training loop. Both train everything with AdamW, without decay, and clip at
1.0. Engines run in turn, each in a process of its own; see `step_time.py`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import step_time

HERE = Path(__file__).resolve().parent
CLIP = 1.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["loop", "forge"], choices=sorted(ENGINES))
    parser.add_argument("--engine", choices=sorted(ENGINES), help="run only this one, here, and print its JSON line")
    parser.add_argument("--weights", default="", help="folder with the published and the imported model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=["fp32"], default="fp32")
    sizes = {"steps": 10, "warm": 3, "threads": 1, "batch": 2, "seq": 320, "answer": 48, "seed": 0}
    sizes |= {"dim": 256, "layers": 6, "heads": 8, "kv": 4, "hidden": 768, "vocab": 8192}
    sizes |= {"tower_dim": 160, "tower_layers": 6, "tower_heads": 4, "tower_hidden": 448, "patch": 14}
    sizes |= {"frames": 4, "rows": 12, "columns": 16}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser.parse_args()


def component(options: argparse.Namespace):
    from clip_rows import ClipRows

    clip = (options.frames, options.rows, options.columns)
    shape = {"vocab_size": options.vocab, "sequences": options.batch, "answer": options.answer}
    return ClipRows(**shape, clip=clip, seconds=0.5)


def forge(options: argparse.Namespace, meter: step_time.Meter) -> None:
    patches = (options.frames + 1) * options.rows * options.columns
    room = {"images_per_sequence": 2, "patches_per_sequence": patches}
    overrides = [f"--model.vision.{name}={value}" for name, value in room.items()]
    step_time.train_job(options, meter, job_text, overrides)


def job_text(options: argparse.Namespace, folder: str) -> str:
    return f"""
{(Path(options.weights) / "run/start.toml").read_text()}
[job]
output = "{folder}"
[train]
steps = {options.steps}
global_batch_size = {options.batch}
seq_len = {options.seq}
precision = "{options.dtype}"
grad_clip_norm = {CLIP}
[[data.sources]]
type = "{HERE}/clip_rows.py:ClipRows"
vocab_size = {options.vocab}
sequences = {options.batch}
answer = {options.answer}
clip = [{options.frames}, {options.rows}, {options.columns}]
seconds = 0.5
[loss]
type = "chunked_cross_entropy"
[optimizer]
type = "adamw"
lr = {options.lr}
betas = [0.9, 0.95]
weight_decay = 0.0
[plugins.cpu_products]
"""


def published(options: argparse.Namespace):
    """A model of `transformers` with random weights."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    head = options.dim // options.heads // 2
    tower = {
        "hidden_size": options.tower_dim,
        "intermediate_size": options.tower_hidden,
        "depth": options.tower_layers,
        "num_heads": options.tower_heads,
        "out_hidden_size": options.dim,
        "patch_size": options.patch,
        "window_size": 8 * options.patch,
        "fullatt_block_indexes": [options.tower_layers // 2 - 1, options.tower_layers - 1],
        "tokens_per_second": 2,
    }
    language = {
        "vocab_size": options.vocab,
        "hidden_size": options.dim,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv,
        "intermediate_size": options.hidden,
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [head - 2 * (head // 3), head // 3, head // 3]},
    }
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: options.vocab - 1 - number for number, name in enumerate(names)}
    config = Qwen2_5_VLConfig(vision_config=tower, text_config=language, **ids, attn_implementation="sdpa")
    return Qwen2_5_VLForConditionalGeneration(config)


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Write the model of both sides."""
    import torch

    from forge_plugin_weights.importing import import_folder

    torch.manual_seed(options.seed)
    published(options).save_pretrained(folder / "published")
    import_folder(folder / "published", folder / "run", tokenizer=False)


def batch_of(options: argparse.Namespace, config):
    """The rows as `transformers` takes them: patches normalised, in its processor's order; it shifts labels itself."""
    import numpy as np
    import torch
    from clip_rows import row_of

    from forge_plugin_vision import IMAGE, PATCHES, VIDEO
    from forge_plugin_weights.pixels import CLIP_MEAN, CLIP_STD

    values, frame = 3 * 2 * options.patch**2, options.rows * options.columns
    rows = [row_of(component(options), number, options.seq, values, 2) for number in range(options.batch)]
    ids = torch.tensor(np.stack([row["input_ids"] for row in rows]))
    labels = torch.nn.functional.pad(
        torch.tensor(np.stack([row["labels"] for row in rows]))[:, :-1], (1, 0), value=-100
    )
    mean, std = (torch.tensor(each).repeat_interleave(values // 3) for each in (CLIP_MEAN, CLIP_STD))

    def pixels(patches: np.ndarray, frames: int):
        normalised = (torch.tensor(patches) / 255 - mean) / std
        blocks = normalised.view(frames, options.rows // 2, 2, options.columns // 2, 2, values).transpose(2, 3)
        return blocks.reshape(-1, values)

    clip = options.frames * frame
    return {
        "input_ids": ids.where(ids != IMAGE, config.image_token_id).where(ids != VIDEO, config.video_token_id),
        "labels": labels,
        "mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        "pixel_values": torch.cat([pixels(row[PATCHES][clip:], 1) for row in rows]),
        "image_grid_thw": torch.tensor([[1, options.rows, options.columns]] * options.batch),
        "pixel_values_videos": torch.cat([pixels(row[PATCHES][:clip], options.frames) for row in rows]),
        "video_grid_thw": torch.tensor([[options.frames, options.rows, options.columns]] * options.batch),
        "second_per_grid_ts": torch.full((options.batch,), 0.5),
    }


def loop(options: argparse.Namespace, meter: step_time.Meter) -> None:
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    folder = Path(options.weights) / "published"
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, attn_implementation="sdpa").train()
    batch = batch_of(options, model.config)
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, (0.9, 0.95), weight_decay=0.0, fused=True)
    loss = torch.zeros(())
    for _ in range(options.steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        meter.tick()
    meter.report("loop", loss.item(), sum(p.numel() for p in model.parameters()))


ENGINES = {"forge": forge, "loop": loop}


def main() -> None:
    options = arguments()
    sys.path.insert(0, str(HERE))
    if options.engine is None:
        with tempfile.TemporaryDirectory() as folder:
            prepare(options, Path(folder))
            sys.argv += ["--weights", folder]
            step_time.compare(options, __file__, "loop")
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    import torch

    torch.set_num_threads(options.threads)
    ENGINES[options.engine](options, step_time.Meter(options))


if __name__ == "__main__":
    main()
