"""CPU and wall time a step of a hybrid: Forge, and transformers' class of Qwen3.5's text model without its kernels.

    python tests/benchmarks/hybrid_step.py --rounds 3
    python tests/benchmarks/hybrid_step.py --engine forge --weights FOLDER        # one engine, one JSON line

Three layers of Gated DeltaNet to one of softmax attention. Both begin with the same weights (`forge-run weights
import`) and see the same random tokens, so their losses after the last step must be equal up to rounding. `loop` is a
plain training loop. Both train everything with AdamW, without decay, and clip at 1.0. Engines run in turn, each in a
process of its own; see `step_time.py`.
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
    sizes = {"steps": 10, "warm": 3, "threads": 1, "batch": 2, "seq": 512, "seed": 0}
    sizes |= {"dim": 256, "layers": 8, "heads": 4, "kv": 2, "head-dim": 64, "hidden": 768, "vocab": 8192}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    return parser.parse_args()


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Write the model of both sides."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    from forge_plugin_weights.importing import import_folder

    torch.manual_seed(options.seed)
    config = Qwen3_5TextConfig(
        vocab_size=options.vocab,
        hidden_size=options.dim,
        intermediate_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv,
        head_dim=options.head_dim,
        linear_num_key_heads=options.heads,
        linear_num_value_heads=options.heads,
        linear_key_head_dim=options.head_dim,
        linear_value_head_dim=options.head_dim,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen3_5ForCausalLM(config).save_pretrained(folder / "published")
    import_folder(folder / "published", folder / "run", tokenizer=False)


def forge(options: argparse.Namespace, meter: step_time.Meter) -> None:
    step_time.train_job(options, meter, job_text)


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
type = "{HERE}/random_tokens.py:RandomTokens"
vocab_size = {options.vocab}
sequences = {options.batch}
[loss]
type = "chunked_cross_entropy"
[optimizer]
type = "adamw"
lr = {options.lr}
betas = [0.9, 0.95]
weight_decay = 0.0
[plugins.cpu_products]
"""


def loop(options: argparse.Namespace, meter: step_time.Meter) -> None:
    import numpy as np
    import torch
    from transformers import Qwen3_5ForCausalLM

    model = Qwen3_5ForCausalLM.from_pretrained(Path(options.weights) / "published", attn_implementation="sdpa").train()
    # As `RandomTokens` draws them: each step has all rows
    rows = np.random.default_rng(1234).integers(0, options.vocab, (options.batch, options.seq + 1))
    ids, labels = (torch.from_numpy(part.copy()) for part in (rows[:, :-1], rows[:, 1:]))
    optimizer = torch.optim.AdamW(model.parameters(), options.lr, (0.9, 0.95), weight_decay=0.0, fused=True)
    loss = torch.zeros(())
    for _ in range(options.steps):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
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
