"""Generation with a cache: CPU time per token at several lengths, beside transformers with equal weights.

python tests/benchmarks/generation.py --rounds 3
python tests/benchmarks/generation.py --lengths 1024 8192 32768   # the step at a cache of that length, and its memory

First table: one greedy row and a batch of them, from a short prompt; both sides in turns in one process, medians of the
CPU time per token after the first. Second: one step of Forge alone at a filled cache, and the bytes of its mask.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forge_plugin_generate.generate import Sampling, generate
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_plugin_transformer.huggingface_names import to_huggingface
from forge_plugin_transformer.layer_parts import default_hidden
from forge_plugin_transformer.modules.cache import Cache
from forge_testing.runs import tiny_run

PROMPT = 16


def both(dim, layers, vocabulary, length):
    """Returns Forge's model and transformers', with equal weights."""
    heads, hidden = dim // 64, default_hidden(dim)
    attention = GroupedQueryAttention(heads=heads, kv_heads=heads)
    model = Transformer(attention=attention, ffn=SwiGLU(hidden=hidden), dim=dim, layers=layers, vocab_size=vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        network = tiny_run(folder, model=model).model
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=dim,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            rms_norm_eps=network.norm.eps,
            max_position_embeddings=length,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    reference.load_state_dict({to_huggingface(name): value for name, value in network.named_parameters()})
    return network.eval(), reference.eval()


def cpu(function):
    """Returns the result of a call and its seconds of CPU time."""
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def compare(options):
    """Print CPU time per token of both sides."""
    network, reference = both(options.dim, options.layers, options.vocab, max(options.tokens) + PROMPT)
    print(f"{'rows':>5} {'tokens':>7} {'forge ms':>9} {'transformers ms':>16} {'ratio':>6}")
    for rows in options.rows:
        prompts = torch.randint(1, options.vocab, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
        for tokens in options.tokens:
            times = {"forge": [], "hf": []}
            for _ in range(options.rounds + 1):  # the first warms up
                ours, seconds = cpu(
                    lambda: generate(network, prompts.tolist(), tokens, -1, Sampling(temperature=0.0))  # noqa: B023
                )
                times["forge"].append(seconds)
                theirs, seconds = cpu(
                    lambda: reference.generate(prompts, max_new_tokens=tokens, do_sample=False)  # noqa: B023
                )
                times["hf"].append(seconds)
            assert ours == theirs[:, PROMPT:].tolist(), "the tokens differ"
            forge, hf = (1e3 * median(times[side][1:]) / tokens for side in ("forge", "hf"))
            print(f"{rows:>5} {tokens:>7} {forge:>9.2f} {hf:>16.2f} {forge / hf:>6.2f}", flush=True)


@torch.no_grad()
def steps(options):
    """Print the CPU time of one token at caches of several lengths, and the bytes of its mask."""
    network, _ = both(options.dim, options.layers, options.vocab, max(options.lengths) + 8)
    print(f"{'cache':>7} {'ms per token':>13} {'mask ms':>8} {'mask bytes':>11}")
    for length in options.lengths:
        cache = network.new_cache(1, length + 8)
        for start in range(0, length, 1024):
            positions = torch.arange(start, min(start + 1024, length))[None]
            network.decode({"input_ids": torch.ones_like(positions), "positions": positions}, cache)
        times = []
        for place in range(length, length + 6):
            batch = {"input_ids": torch.ones(1, 1, dtype=torch.int64), "positions": torch.tensor([[place]])}
            times.append(cpu(lambda: network.decode(batch, cache))[1])  # noqa: B023
        alone = Cache(1, length + 8)
        alone.append([torch.zeros(1, length, 1)], torch.arange(length)[None], torch.empty(0))
        masks = [cpu(lambda: alone.mask(torch.tensor([[length]]))) for _ in range(5)]  # noqa: B023
        mask = median(seconds for _, seconds in masks)
        print(f"{length:>7} {1e3 * median(times):>13.2f} {1e3 * mask:>8.3f} {masks[0][0].nbytes:>11}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--lengths", type=int, nargs="*", help="only the second table, at these lengths")
    options = parser.parse_args()
    if options.lengths:
        steps(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
