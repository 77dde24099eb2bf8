"""Steps of Forge under `fsdp` and `tp` on two CPU ranks, against torch's own recipe for the same model.

python tests/benchmarks/layouts.py [--rounds 6] [--only fsdp2]

The recipe is what torch's tutorials write: `fully_shard` of each block and of the model; or `parallelize_module` with
sequence parallel and `loss_parallel`. Both sides live in the same processes and take turns of some steps; figures are
medians. All clip at 1.0 and use fused AdamW, in fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
import warnings
from types import SimpleNamespace

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from plain_loop import Block, LanguageModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from forge_core.engine.build import build_context, build_run
from forge_core.engine.step import Stepper
from forge_core.plugins.catalog import Catalog
from forge_plugin_adamw import AdamW
from forge_plugin_losses import ChunkedCrossEntropy
from forge_plugin_parallel import FSDP, TensorParallel
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_testing import Numbers, tiny_job
from forge_testing.processes import run_on_ranks

SIZES = {"vocab": 8192, "dim": 256, "layers": 6, "heads": 8, "kv_heads": 4, "hidden": 768}
LENGTH, SEQUENCES, CLIP, STEPS = 512, 4, 1.0, 4
STAGES = {"fsdp2": {"fsdp": FSDP()}, "tp2": {"tp": TensorParallel(degree=2)}}


class PlainBlock(Block):
    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class PlainModel(LanguageModel):
    def __init__(self):
        super().__init__(**SIZES, length=LENGTH)
        shape = {name: SIZES[name] for name in ("dim", "heads", "kv_heads", "hidden")}
        self.blocks = nn.ModuleList(PlainBlock(**shape) for _ in range(SIZES["layers"]))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def split_by_tutorial(model, mesh):
    """Tensor parallel with sequence parallel and loss parallel."""
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        plan = {f"norm{number}": SequenceParallel() for number in (1, 2)}
        whole = (Replicate(), None, None)
        plan["attention"] = PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=whole)
        plan |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan["attention.out"] = RowwiseParallel(output_layouts=Shard(1))
        plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("gate", "up")}
        plan["down"] = RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(block, mesh, plan)
        attention = block.attention
        attention.heads, attention.kv_heads = attention.heads // 2, attention.kv_heads // 2
        attention.forward = LocalAttention(attention)


class LocalAttention:
    """The plain attention, whose output projection takes this rank's heads."""

    def __init__(self, attention):
        self.attention = attention

    def __call__(self, x, cos, sin):
        own = self.attention
        batch, length, _ = x.shape
        heads = [own.q(x), own.k(x), own.v(x)]
        q, k, v = (part.view(batch, length, -1, own.head_dim).transpose(1, 2) for part in heads)
        from plain_loop import rotate

        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return own.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def recipe(layout, rank):
    """A step of torch's recipe."""
    torch.manual_seed(0)
    model = PlainModel()
    rows = SEQUENCES
    if layout == "tp2":
        split_by_tutorial(model, init_device_mesh("cpu", (2,)))
    else:
        rows = SEQUENCES // 2
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    generator = torch.Generator().manual_seed(rank if layout == "fsdp2" else 0)

    def step():
        ids = torch.randint(0, SIZES["vocab"], (rows, LENGTH + 1), generator=generator)
        with loss_parallel() if layout == "tp2" else contextlib.nullcontext():
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def forge(layout, folder):
    """A step of Forge: all of it but logging."""
    model = Transformer(
        vocab_size=SIZES["vocab"],
        dim=SIZES["dim"],
        layers=SIZES["layers"],
        attention=GroupedQueryAttention(heads=SIZES["heads"], kv_heads=SIZES["kv_heads"]),
        ffn=SwiGLU(hidden=SIZES["hidden"]),
    )
    job = tiny_job(
        folder,
        Catalog.installed(),
        model=model,
        optimizer=AdamW(lr=3e-4),
        loss=ChunkedCrossEntropy(),
        data={"sources": (Numbers(),)},
        parallel=STAGES[layout],
        precision="fp32",
        grad_clip_norm=CLIP,
        global_batch_size=SEQUENCES,
        seq_len=LENGTH,
    )
    run = build_run(job, build_context(job, Catalog.installed(), None))
    stepper, count = Stepper(run), iter(range(10**6))
    rows = SEQUENCES // run.context.layout.data_parallel
    generator = torch.Generator().manual_seed(0)

    def step():
        number = next(count)
        run.rates.apply(0, 0)
        ids = torch.randint(0, SIZES["vocab"], (rows, LENGTH + 1), generator=generator)
        batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
        _, sums = stepper.gradients([batch], number)
        context = SimpleNamespace(grad_norm=stepper.norm(), requests=SimpleNamespace(skip=""))
        stepper.update(context, sums["loss_sum"])

    return step


def measure(rank, layout, rounds, folder):
    """Wall and CPU seconds of each step, by side."""
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        sides = {"torch": recipe(layout, rank), "forge": forge(layout, folder)}
    times = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, step in sides.items():
            for _ in range(STEPS):
                torch.distributed.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                step()
                if number:  # the first round warms up
                    times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", choices=sorted(STAGES))
    options = parser.parse_args()
    print("| | ms a step | CPU ms a step and rank | tokens a second | of torch's | by CPU time |\n" + 6 * "|---" + "|")
    for layout in [options.only] if options.only else STAGES:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_on_ranks(2, lambda r: measure(r, layout, options.rounds, folder), timeout=1800)  # noqa: B023
        median = {}
        for name in ("torch", "forge"):
            wall = statistics.median(wall for wall, _ in ranks[0][name])
            median[name] = wall, statistics.median(cpu for found in ranks for _, cpu in found[name])
        for name, (wall, cpu) in median.items():
            base_wall, base_cpu = median["torch"]
            speed = SEQUENCES * LENGTH / wall
            ratios = f"{base_wall / wall:.2f} | {base_cpu / cpu:.2f}"
            print(f"| {layout}, {name} | {wall * 1e3:.0f} | {cpu * 1e3:.0f} | {speed:,.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
