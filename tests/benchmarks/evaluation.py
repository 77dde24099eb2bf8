"""Evaluation of a checkpoint: forge-plugin-evaluate beside the `hf` model of lm-evaluation-harness, with equal weights.

python tests/benchmarks/evaluation.py --rounds 5

Requests are made of random words of a vocabulary of 32,000. Both sides run in turns in one process; ratios are of the
medians of CPU time. Answers are compared first: log-probabilities within 1e-3, texts where they agree.

With `--onednn`, Forge's side computes as that of a job which names `[plugins.cpu_products]`, the other side as it does.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from statistics import median
from types import SimpleNamespace

import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forge_plugin_compile.products.dispatch import take_over
from forge_plugin_compile.products.onednn import ByOneDNN
from forge_plugin_evaluate.harness.model import ForgeLM
from forge_plugin_transformer import GroupedQueryAttention, SwiGLU, Transformer
from forge_plugin_transformer.huggingface_names import to_huggingface
from forge_plugin_transformer.layer_parts import default_hidden
from forge_testing.runs import tiny_run

VOCABULARY, END, LENGTH = 32_000, "<end>", 256


class Words:
    """See `forge_core.contracts.data.Tokenizer`: a token is a word."""

    vocab_size, end_of_text = VOCABULARY, 0

    def __init__(self):
        names = {END: 0, **{f"w{number}": number for number in range(1, VOCABULARY)}}
        self.inner = Tokenizer(models.WordLevel(names, unk_token=END))
        self.inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    def encode(self, text):
        return self.inner.encode(text).ids

    def encode_batch(self, texts):
        return [encoding.ids for encoding in self.inner.encode_batch(texts)]

    def decode(self, ids):
        return " ".join(f"w{number}" for number in ids if number)

    def fingerprint(self):
        return "words"


def both(options):
    """Returns the two models, by name."""
    heads, hidden = options.dim // 64, default_hidden(options.dim)
    attention = GroupedQueryAttention(heads=heads, kv_heads=heads)
    sizes = {"dim": options.dim, "layers": options.layers, "vocab_size": VOCABULARY}
    with tempfile.TemporaryDirectory() as folder:
        network = tiny_run(folder, model=Transformer(attention=attention, ffn=SwiGLU(hidden=hidden), **sizes)).model
    with torch.no_grad():
        for parameter in network.layers.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)  # the likeliest words of fresh weights repeat themselves at once
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=options.dim,
            intermediate_size=hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            rms_norm_eps=network.norm.eps,
            max_position_embeddings=LENGTH,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    reference.load_state_dict({to_huggingface(name): value for name, value in network.named_parameters()})
    words = Words()
    theirs = PreTrainedTokenizerFast(tokenizer_object=words.inner, eos_token=END, pad_token=END)
    ours = {"max_length": LENGTH, "batch_size": options.batch}
    return {
        "forge": ForgeLM(network.eval(), words, **ours),
        "hf": HFLM(pretrained=reference.eval(), tokenizer=theirs, **ours),
    }


def requests():
    """Returns (name, method, requests) of each kind of task."""
    draw = random.Random(0)

    def words(least, most):
        return " ".join(f"w{draw.randrange(1, VOCABULARY)}" for _ in range(draw.randint(least, most)))

    def request(*arguments):
        return SimpleNamespace(args=arguments)

    contexts = [words(40, 120) for _ in range(24)]
    given = {"until": ["w5 w5"], "max_gen_toks": 48, "do_sample": False}
    until = {"until": ["99"], "max_gen_toks": 96, "do_sample": False}  # in one word of 27
    choices = [request(context, f" {words(8, 30)}") for context in contexts for _ in range(4)]
    letters = [request(context, f" w{number}") for context in contexts for number in range(1, 5)]
    return (
        ("choices of 8 to 30 tokens", "loglikelihood", choices),
        ("choices of one token", "loglikelihood", letters),
        ("whole texts of 600 tokens", "loglikelihood_rolling", [request(words(600, 600)) for _ in range(4)]),
        ("48 tokens, likeliest", "generate_until", [request(context, given) for context in contexts]),
        ("up to 96 tokens, until a text", "generate_until", [request(words(40, 120), until) for _ in range(64)]),
    )


def compare(method, ours, theirs):
    """Returns in words how far answers agree; raises `AssertionError` where log-probabilities do not."""
    if method == "generate_until":
        lengths = sorted(len(text.split()) for text in ours)
        quartiles = [lengths[len(lengths) * part // 4] for part in range(1, 4)]
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        return f"{same} of {len(ours)} texts equal, lengths {lengths[0]} to {lengths[-1]}, quartiles {quartiles}"
    if method == "loglikelihood":
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
        ours, theirs = [value for value, _ in ours], [value for value, _ in theirs]
    difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert difference < 1e-3 * max(map(abs, theirs)), difference
    return f"log-probabilities within {difference:.1g}"


def timed(lm, method, asked, onednn):
    """Returns seconds of CPU time."""
    if onednn:
        take_over(ByOneDNN())
    try:
        started = time.process_time()
        getattr(lm, method)(asked, disable_tqdm=True)
        return time.process_time() - started
    finally:
        take_over()


def measure(options):
    lms = both(options)
    print("| task | forge s | hf s | times as fast | |\n|---|---|---|---|---|")
    for name, method, asked in requests():
        if options.only not in name:
            continue
        answers = {which: getattr(lm, method)(asked, disable_tqdm=True) for which, lm in lms.items()}
        seconds = {which: [] for which in lms}
        for _ in range(options.rounds):
            for which, lm in lms.items():
                seconds[which].append(timed(lm, method, asked, onednn=options.onednn and which == "forge"))
        ours, theirs = (median(seconds[which]) for which in ("forge", "hf"))
        equal = compare(method, answers["forge"], answers["hf"])
        print(f"| {name} | {ours:.2f} | {theirs:.2f} | **{theirs / ours:.2f}** | {equal} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--onednn", action="store_true", help="as a job with [plugins.cpu_products] on Forge's side")
    parser.add_argument("--only", default="", help="tasks with this in their name")
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    measure(settings)
