"""CPU and wall time a step with features of a frozen tower kept on disk, and without; against rows of text.

    python tests/benchmarks/features.py --rounds 3
    python tests/benchmarks/features.py --engine second      # one of them, one JSON line

Rows of an image, a question and an answer, all of one length. `text`: the language model alone, on as many tokens.
`without`: the tower runs in each step. `first`: no image has been seen before, so the tower runs, and its features are
written. `second`: each image has been seen. Engines run in turn, each in a process of its own; see `step_time.py`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import step_time

HERE = Path(__file__).resolve().parent
ENGINES = ("text", "without", "first", "second")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--engine", choices=ENGINES, help="run only this one, here, and print its JSON line")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    sizes = {"steps": 16, "warm": 6, "threads": 1, "batch": 4, "seq": 256, "answer": 32, "seed": 0}
    sizes |= {"dim": 256, "layers": 6, "heads": 8, "kv": 4, "hidden": 768, "vocab": 8192}
    sizes |= {"tower_dim": 384, "tower_layers": 12, "tower_heads": 6, "patch": 16, "side": 224}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.engine is None:
        step_time.compare(options, __file__, "text")
        return
    sys.path.insert(0, str(HERE))
    import torch

    torch.set_num_threads(options.threads)
    step_time.train_job(options, step_time.Meter(options), job_text)


def job_text(options: argparse.Namespace, folder: str) -> str:
    # Before the steps that count, `second` has seen all rows, and `first` none of theirs.
    epoch = options.warm - 1 if options.engine == "second" else options.steps
    text = options.engine == "text"
    return f"""
[job]
output = "{folder}"
[train]
steps = {options.steps}
global_batch_size = {options.batch}
seq_len = {options.seq}
precision = "{options.dtype}"
[model]
{f'type = "transformer"{language(options, "model")}' if text else vision(options)}
[[data.sources]]
type = "{HERE}/image_rows.py:{"TextRows" if text else "ImageRows"}"
vocab_size = {options.vocab}
sequences = {epoch * options.batch}
answer = {options.answer}
[loss]
type = "chunked_cross_entropy"
[optimizer]
type = "adamw"
lr = 3e-4
[plugins.cpu_products]
{"" if text else FROZEN}
{KEPT.format(folder=folder) if options.engine in ("first", "second") else ""}
"""


FROZEN = '[plugins.freeze]\n[[plugins.freeze.stages]]\nfreeze = ["vision.encoder.*"]'
KEPT = '[plugins.features]\npath = "{folder}/features"'


def language(options: argparse.Namespace, table: str) -> str:
    return f"""
dim = {options.dim}
layers = {options.layers}
vocab_size = {options.vocab}
[{table}.attention]
heads = {options.heads}
kv_heads = {options.kv}
[{table}.ffn]
hidden = {options.hidden}
"""


def vision(options: argparse.Namespace) -> str:
    return f"""
type = "vision_language"
[model.language]
{language(options, "model.language")}
[model.vision.encoder]
type = "vit"
dim = {options.tower_dim}
layers = {options.tower_layers}
heads = {options.tower_heads}
patch = {options.patch}
size = [{options.side}, {options.side}]
"""


if __name__ == "__main__":
    main()
