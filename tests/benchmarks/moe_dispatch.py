"""What experts cost besides their products: CPU time of a stack, bytes that ranks send each other, and time of a pass.

    python tests/benchmarks/moe_dispatch.py [--ranks 4] [--ranks-per-node 2] [--dtype bf16] [--rounds 7]

One process: CPU time of forward and backward of a stack, beside its products alone on rows that are in order already,
and beside the plain way, a loop over experts with `index_add`. Ranks: bytes of tokens and sums that a rank sends to
others in a forward pass, counted where they are sent, beside T x D x (mean number of other ranks that a token goes to)
there and as many back, and beside what each choice by itself would send; with nodes, likewise to other nodes. Last,
wall time of a pass with a shared expert, computed while tokens travel and before; both take turns, and figures are
medians. Choices are random.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist

from forge_kit.nn.dispatch import ExpertRanks
from forge_plugin_moe.modules.experts import Experts
from forge_plugin_parallel.ep_all_to_all import AllToAllDispatcher
from forge_plugin_parallel.ep_exchange import Exchange, LocalExperts
from forge_plugin_transformer import InitStd
from forge_plugin_transformer.modules.feed_forward import GatedFeedForward
from forge_testing.processes import run_on_ranks

INIT = InitStd(inner=0.02, residual=0.02)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"ranks": 4, "ranks_per_node": 2, "tokens": 4096, "dim": 512, "hidden": 256, "experts": 32, "top_k": 8}
    for name, default in (sizes | {"shared": 1024, "rounds": 7}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    return parser.parse_args()


def stack_of(args, experts):
    torch.manual_seed(0)
    stack = Experts(experts, args.dim, args.hidden, init=INIT, grouped=True)
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return stack


def inputs_of(args, rank=0):
    torch.manual_seed(rank)
    tokens = torch.randn(args.tokens, args.dim, dtype=DTYPES[args.dtype], requires_grad=True)
    weights = torch.rand(args.tokens, args.top_k, requires_grad=True)
    return tokens, weights, torch.rand(args.tokens, args.experts).argsort(1)[:, : args.top_k]


def medians(ways, rounds, clock):
    """Milliseconds of each way; they take turns."""
    times = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = clock()
            way()
            times[name].append(1e3 * (clock() - start))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


# --- one process ------------------------------------------------------------------------------------------------------


def plain(stack, tokens, weights, chosen):
    y = torch.zeros_like(tokens)
    for expert in range(len(stack.gate.weight)):
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        gate, up, down = (module.weight[expert].to(tokens.dtype) for module in (stack.gate, stack.up, stack.down))
        x = tokens[token]
        part = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        y = y.index_add(0, token, part * weights[token, choice].to(part.dtype).unsqueeze(1))
    return y


def products(stack, rows, ends):
    return stack.down(torch.nn.functional.silu(stack.gate(rows, ends)) * stack.up(rows, ends), ends)


def one_process(args):
    stack, (tokens, weights, chosen) = stack_of(args, args.experts), inputs_of(args)
    rows = torch.randn(chosen.numel(), args.dim, dtype=tokens.dtype, requires_grad=True)
    ends = chosen.flatten().bincount(minlength=args.experts).cumsum(0, dtype=torch.int32)
    ways = {
        "stack": lambda: stack(tokens, weights, chosen, rows=chosen.numel()),
        "products alone": lambda: products(stack, rows, ends),
        "plain loop": lambda: plain(stack, tokens, weights, chosen),
    }
    passes = {name: lambda way=way: way().sum().backward() for name, way in ways.items()}
    return medians(passes, args.rounds, time.process_time)


# --- ranks ------------------------------------------------------------------------------------------------------------


def exchange_of(args, per_node):
    each = args.experts // args.ranks
    stack = stack_of(args, each)
    local = LocalExperts(stack, stack.forward)

    def exchange(forward, group, experts, outer=1):
        return Exchange(forward, AllToAllDispatcher(ExpertRanks(group, experts, outer)))

    if not per_node:
        return exchange(local, dist.group.WORLD, each)
    ranks = torch.arange(args.ranks).view(-1, per_node)
    across, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist())
    within, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    return exchange(exchange(local, within, each, outer=len(ranks)), across, each * per_node)


def bytes_sent(args, rank, per_node, exchange, inputs):
    """(to other ranks, to other nodes) of tokens and sums, in a forward pass."""
    send, sent = dist.all_to_all_single, [0, 0]

    def counted(received, x, outputs=None, inputs=None, group=None, **more):
        for place, rows in enumerate(inputs or ()):
            other = dist.get_global_rank(group, place)
            size = rows * x.shape[1] * x.element_size() if x.shape[1] == args.dim else 0
            sent[0] += size * (other != rank)
            sent[1] += size * (other // args.ranks_per_node != rank // args.ranks_per_node)
        return send(received, x, outputs, inputs, group=group, **more)

    with mock.patch.object(dist, "all_to_all_single", counted), torch.no_grad():
        exchange(*inputs)
    return sent


def theory(args, rank, chosen, experts, own):
    """(once a place, by each choice): bytes to places other than this rank's own, which have so many experts each, and
    as many back from here, on average."""
    places = torch.zeros(len(chosen), args.experts // experts, dtype=torch.bool).scatter_(1, chosen // experts, True)
    places[:, own] = False
    size = 2 * args.dim * DTYPES[args.dtype].itemsize
    return places.sum().item() * size, (chosen // experts != own).sum().item() * size


def on_a_rank(args, rank):
    inputs = inputs_of(args, rank)
    flat, nodes = exchange_of(args, 0), exchange_of(args, args.ranks_per_node)
    each = args.experts // args.ranks
    per_node = each * args.ranks_per_node
    found = {
        "sent": [bytes_sent(args, rank, per_node, way, inputs) for way in (flat, nodes)],
        "expected": [
            theory(args, rank, inputs[2], each, rank),
            theory(args, rank, inputs[2], per_node, rank // args.ranks_per_node),
        ],
    }
    shared = GatedFeedForward(args.dim, args.shared, bias=False, init=INIT)
    for parameter in shared.parameters():
        torch.nn.init.normal_(parameter, std=0.02)

    def during():
        results = []
        y = flat(*inputs, overlap_fn=lambda: results.append(shared(inputs[0], {})))
        (y + results[0]).sum().backward()

    def before():
        first = shared(inputs[0], {})
        (flat(*inputs) + first).sum().backward()

    found["ms"] = medians({"while tokens travel": during, "before": before}, args.rounds, time.perf_counter)
    return found


def main():
    args = arguments()
    torch.set_num_threads(1)
    print(f"{args.tokens} tokens, width {args.dim}, {args.top_k} of {args.experts} experts, {args.dtype}")
    for name, milliseconds in one_process(args).items():
        print(f"  CPU of forward and backward, {name:15} {milliseconds:9.1f} ms")
    ranks = run_on_ranks(args.ranks, lambda rank: on_a_rank(args, rank), timeout=600)

    def mean(pick):
        return statistics.mean(map(pick, ranks)) / 1e6

    print(f"{args.ranks} ranks, {args.ranks_per_node} a node; MB that a rank sends in a forward pass, mean over ranks")
    print(f"  to other ranks: {mean(lambda r: r['sent'][0][0]):8.2f}", end="")
    print(f"   theory {mean(lambda r: r['expected'][0][0]):8.2f}", end="")
    print(f"   each choice by itself {mean(lambda r: r['expected'][0][1]):8.2f}")
    print(f"  to other nodes: {mean(lambda r: r['sent'][0][1]):8.2f}   with ranks_per_node", end="")
    print(f" {mean(lambda r: r['sent'][1][1]):8.2f}   theory {mean(lambda r: r['expected'][1][0]):8.2f}", end="")
    print(f"   each choice by itself {mean(lambda r: r['expected'][1][1]):8.2f}")
    for name in ranks[0]["ms"]:
        print(
            f"  a pass with a shared expert computed {name:20} {1e3 * mean(lambda r, n=name: 1e3 * r['ms'][n]):8.1f} ms"
        )


if __name__ == "__main__":
    main()
