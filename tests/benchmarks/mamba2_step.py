"""What a step and a token cost in a layer: `mamba2` beside transformers' Mamba-2 without kernels, in turns.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python tests/benchmarks/mamba2_step.py

CPU time of a forward and backward pass of one layer, weights included, per token, in float32, with equal weights; the
largest difference of their results. Medians of rounds, in which all sides follow each other. Chunks of transformers are
those of published configurations, 256, and as long as ours. Last: a generated token with a cache, of one row.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from types import SimpleNamespace

import torch
from transformers import DynamicCache, Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from forge_plugin_linear_attention import Mamba2
from forge_plugin_transformer import InitStd

CHUNKS = 256, 64


def layers(options):
    """Returns our layer, theirs by the length of chunks, with the same weights, and the first of its configurations."""
    sizes = {"num_heads": options.heads, "head_dim": 2 * options.dim // options.heads, "expand": 2}
    sizes |= {"hidden_size": options.dim, "state_size": options.state, "n_groups": options.groups}
    torch.manual_seed(0)
    configs = {chunk: Mamba2Config(num_hidden_layers=1, chunk_size=chunk, **sizes) for chunk in CHUNKS}
    theirs = {chunk: Mamba2Mixer(config, 0) for chunk, config in configs.items()}
    first = theirs[CHUNKS[0]]
    theirs[CHUNKS[1]].load_state_dict(first.state_dict())
    component = Mamba2(heads=options.heads, state=options.state, groups=options.groups, chunk=options.chunk)
    ours = component.build(
        SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32), options.dim, InitStd(0.02, 0.02)
    )
    widths = {"gate": 2 * options.dim, "x": 2 * options.dim, "b": options.groups * options.state}
    widths |= {"c": widths["b"], "step": options.heads}
    weights = dict(zip(widths, first.in_proj.weight.split([*widths.values()]), strict=True))
    convolved = [widths[name] for name in "xbc"]
    for name, part, bias in zip(
        "xbc", first.conv1d.weight[:, 0].split(convolved), first.conv1d.bias.split(convolved), strict=True
    ):
        weights |= {f"{name}_conv": part, f"{name}_conv_bias": bias}
    weights |= {"log_rate": first.A_log, "offset": first.dt_bias, "skip": first.D}
    weights |= {"norm": first.norm.weight, "o": first.out_proj.weight}
    ours.load_state_dict({f"{name}.weight": tensor for name, tensor in weights.items()})
    return ours, theirs, configs[CHUNKS[0]]


def step(layer, x):
    """Returns the CPU time of both passes, and the result."""
    start = time.process_time()
    y = layer(x)
    y.square().mean().backward()
    return time.process_time() - start, y.detach()


@torch.inference_mode()
def generation(options, ours, theirs, config):
    """Print the CPU time of a token after a prompt of 32."""
    caches = ours.new_cache(1, options.generated + 32), DynamicCache(config=config)
    times = [], []
    for place in range(options.generated):
        positions = torch.arange(32) if place == 0 else torch.tensor([31 + place])
        x = torch.randn(1, len(positions), options.dim)
        batch = {"positions": positions[None]}
        calls = (lambda: ours(x, batch, caches[0])), (lambda: theirs(x, cache=caches[1]))  # noqa: B023
        results = []
        for call, seconds in zip(calls, times, strict=True):
            start = time.process_time()
            results.append(call())
            seconds.append(1e6 * (time.process_time() - start))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    forge, other = (median(seconds[1:]) for seconds in times)
    print(f"a generated token: forge {forge:.0f}, theirs {other:.0f} µs ({forge / other:.2f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("dim", 256), ("heads", 8), ("state", 128), ("groups", 1), ("chunk", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--generated", type=int, default=400, help="tokens")
    options = parser.parse_args()
    ours, theirs, config = layers(options)
    sides = {"forge": lambda x: ours(x, {}), **{f"chunks of {chunk}": mixer for chunk, mixer in theirs.items()}}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; µs of CPU time a token, and forge / theirs")
    for length in options.lengths:
        x = torch.randn(max(1, options.tokens // length), length, options.dim, requires_grad=True)
        times, results = {name: [] for name in sides}, {}
        for _ in range(options.rounds + 1):
            for name, layer in sides.items():
                seconds, results[name] = step(layer, x)
                times[name].append(1e6 * seconds / x[..., 0].numel())
        costs = {name: median(each[1:]) for name, each in times.items()}  # the first warms up
        ratios = "".join(f"  {name} {cost:.1f} ({costs['forge'] / cost:.2f})" for name, cost in costs.items())
        difference = max((results["forge"] - result).abs().max().item() for result in results.values())
        print(f"{length:>6}{ratios}  largest difference {difference:.1e}", flush=True)
    generation(options, ours, theirs[CHUNKS[0]], config)


if __name__ == "__main__":
    main()
