"""CPU and wall time a step, side by side: Forge, a minimal PyTorch loop, and Hugging Face's Trainer, on the same work.

    python tests/benchmarks/step_time.py --dtype bf16 --rounds 3
    python tests/benchmarks/step_time.py --engines forge plain --compile --dtype bf16
    python tests/benchmarks/step_time.py --engine forge --dtype fp32        # one engine, one JSON line
    python tests/benchmarks/step_time.py --engines forge forge_balanced forge_dense --moe --experts 64 --topk 8

Engines run in turn, A B C A B C …, each in a process of its own; the table gives medians over rounds and ratios to the
plain loop. The figure to trust is CPU time a step (all threads, median over steps): with waits that do not spin
(OMP_WAIT_POLICY=passive, set here) it hardly depends on what else the machine does. All sides clip at 1.0.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIGURES = ("step_cpu_ms_p50", "step_ms_p50", "tokens_per_s", "peak_rss_mb", "first_step_s", "loss_at_step_k", "params")
CLIP = 1.0
SAMPLES_OF = 8
FURTHER_SIZES = {"kv": 4, "hidden": 768, "vocab": 8192, "seed": 0, "experts": 8, "topk": 2, "moe_hidden": 384}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["plain", "forge", "hf"], choices=sorted(ENGINES))
    parser.add_argument("--engine", choices=sorted(ENGINES), help="run only this one, here, and print its JSON line")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--moe", action="store_true", help="a mixture of experts; for Forge alone")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override for Forge's job")
    sizes = {"steps": 30, "warm": 8, "threads": 2, "batch": 4, "seq": 512, "dim": 256, "layers": 6, "heads": 8}
    for name, default in (sizes | FURTHER_SIZES).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--wd", type=float, default=0.1)
    for accepted in ("--variant", "--opt"):  # options of the peers' harness that have no meaning here
        parser.add_argument(accepted, default="default", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asked = [options.engine] if options.engine else options.engines
    if options.moe and not set(asked) <= set(OURS):
        parser.error(f"--moe is for --engines {' '.join(OURS)}; peers with experts: see docs/benchmarks.md")
    return options


# --- measuring -------------------------------------------------------------------------------------------------------


def process_start() -> float:
    """When this process was created, on the wall clock."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))


STARTED = process_start()


class Meter:
    """Told at the end of every step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.first = 0.0

    def tick(self) -> None:
        self.first = self.first or time.time() - STARTED
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def report(self, name: str, loss: float, params: int) -> None:
        warm, options = self.options.warm, self.options
        wall = [b - a for a, b in zip(self.wall[warm - 1 :], self.wall[warm:], strict=False)]
        cpu = [b - a for a, b in zip(self.cpu[warm - 1 :], self.cpu[warm:], strict=False)]
        tokens = options.batch * options.seq
        figures = {
            "name": name,
            "step_cpu_ms_p50": round(statistics.median(cpu) * 1e3, 2),
            "step_ms_p50": round(statistics.median(wall) * 1e3, 2),
            "tokens_per_s": round(tokens / statistics.mean(wall), 1),
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            "first_step_s": round(self.first, 2),
            "loss_at_step_k": round(loss, 4),
            "params": params,
            "load": round(os.getloadavg()[0], 2),
        }
        print(json.dumps(figures), flush=True)


def token_batches(options: argparse.Namespace):
    """Eight distinct batches of random tokens, (batch, sequence + 1) each."""
    import torch

    generator = torch.Generator().manual_seed(1234)
    shape = (options.batch, options.seq + 1)
    return [torch.randint(0, options.vocab, shape, generator=generator) for _ in range(SAMPLES_OF)]


# --- engines ---------------------------------------------------------------------------------------------------------


def forge(options: argparse.Namespace, meter: Meter) -> None:
    train_job(options, meter, job_text, overrides=[f"--{o}" for o in options.set])


def train_job(options: argparse.Namespace, meter: Meter, job_text, overrides: Sequence[str] = ()) -> None:
    """Run the job `job_text(options, folder)`, and report its steps."""
    from attrs import define

    from forge_core import TrainingHook, load_job
    from forge_core.engine.trainer import Trainer

    @define(kw_only=True, slots=False)
    class Tick(TrainingHook):
        def on_step_end(self, context) -> None:
            meter.tick()

        def on_train_end(self, context) -> None:
            self.params = sum(p.numel() for p in context.model.parameters())

    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder) / "job.toml"
        job_file.write_text(job_text(options, folder))
        tick = Tick()
        with contextlib.redirect_stdout(io.StringIO()):
            summary = Trainer(load_job(job_file, overrides=list(overrides)), hooks=[tick]).run()
    meter.report(options.engine, summary.loss or 0.0, tick.params)


def job_text(options: argparse.Namespace, folder: str) -> str:
    """Forge's defaults for everything that the work does not fix, and the plugin that `configs/` has for CPUs."""
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
type = "transformer"
dim = {options.dim}
layers = {options.layers}
vocab_size = {options.vocab}
[model.attention]
heads = {options.heads}
kv_heads = {options.kv}
{ffn_text(options)}
[[data.sources]]
type = "{HERE}/random_tokens.py:RandomTokens"
vocab_size = {options.vocab}
sequences = {SAMPLES_OF * options.batch}
[loss]
type = "chunked_cross_entropy"
[optimizer]
type = "adamw"
lr = {options.lr}
weight_decay = {options.wd}
[checkpoint.storage]
folder = "checkpoints"
[plugins.cpu_products]
{"[parallel.compile]" if options.compile else ""}
"""


def ffn_text(options: argparse.Namespace) -> str:
    if not options.moe:
        return f"[model.ffn]\nhidden = {options.hidden}"
    if options.engine == "forge_dense":
        return f"[model.ffn]\nhidden = {options.topk * options.moe_hidden}"
    router = "softmax_topk" if options.engine == "forge" else f"{HERE}/balanced_router.py:Balanced"
    moe = f'type = "moe"\nexperts = {options.experts}\nhidden = {options.moe_hidden}'
    return f'[model.ffn]\n{moe}\n[model.ffn.router]\ntype = "{router}"\ntop_k = {options.topk}'


def plain(options: argparse.Namespace, meter: Meter) -> None:
    from plain_loop import train

    loss, params = train(options, token_batches(options), meter.tick, CLIP)
    meter.report("plain", loss, params)


def hf(options: argparse.Namespace, meter: Meter) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_NO_ADVISORY_WARNINGS="1", TOKENIZERS_PARALLELISM="false")
    from hf_trainer import train

    loss, params = train(options, token_batches(options), meter.tick, CLIP)
    meter.report("hf", loss, params)


OURS = {"forge": forge, "forge_balanced": forge, "forge_dense": forge}
"""With `--moe`: experts, the same with equally many tokens for each, and as wide as the experts of a token together."""
ENGINES = OURS | {"plain": plain, "hf": hf}


# --- side by side ----------------------------------------------------------------------------------------------------


def run_one(script: str, name: str, argv: list[str]) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", script, "--engine", name, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if not lines:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    print(lines[-1], file=sys.stderr, flush=True)
    return json.loads(lines[-1])


def compare(options: argparse.Namespace, script: str = __file__, reference: str = "plain") -> None:
    """Run the engines of a script in turn and print medians, with their ratio to the reference."""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in options.engines}
    for _ in range(options.rounds):
        for name in options.engines:
            rows[name].append(run_one(script, name, sys.argv[1:]))
    median = {n: {k: statistics.median(r[k] for r in runs) for k in FIGURES} for n, runs in rows.items()}
    base = median.get(reference, median[options.engines[0]])
    print("| engine | CPU ms a step | wall ms a step | tokens/s | peak MB | first step s | loss |")
    print("|---|---|---|---|---|---|---|")
    for name, found in median.items():
        cells = [
            f"{found[k]:.{d}f} ({found[k] / base[k]:.2f})" for k, d in (("step_cpu_ms_p50", 0), ("step_ms_p50", 0))
        ]
        cells.append(f"{found['tokens_per_s']:,.0f}")
        cells += [f"{found[k]:.{d}f} ({found[k] / base[k]:.2f})" for k, d in (("peak_rss_mb", 0), ("first_step_s", 1))]
        print(f"| {name} | {' | '.join(cells)} | {found['loss_at_step_k']:.4f} |")


def main() -> None:
    options = arguments()
    if options.engine is None:
        compare(options)
        return
    run_here(options)


def run_here(options: argparse.Namespace) -> None:
    """Run the one engine that the options name in this process."""
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    sys.path.insert(0, str(HERE))
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    ENGINES[options.engine](options, Meter(options))


if __name__ == "__main__":
    main()
