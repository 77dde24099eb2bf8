"""The job as a text: every key with what it does, and above all how its sizes were chosen."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import frozen

from forge_plugin_plan.init.corpora import BPE_BYTES, Corpus, Key
from forge_plugin_plan.init.sizes import (
    MOST_EPOCHS,
    TOKENS_PER_PARAMETER,
    WORTH_EPOCHS,
    Budget,
    Machine,
    Sizes,
    amount,
    duration,
    vocabulary_of_text,
)

WIDTH = 118
COMMENT_AT = 34
"""Column of comments, where keys leave room for them."""


@frozen(kw_only=True)
class Draft:
    """Everything that goes into the job."""

    name: str
    corpus: Corpus
    vocab_size: int
    machine: Machine
    budget: Budget
    sizes: Sizes
    start: str = ""
    """`start.toml` of an imported model, if training starts from one."""
    curves: bool = False
    samples: bool = False
    """Whether the distributions of these are installed."""


def render(draft: Draft, path: str) -> str:
    """Returns the job as TOML, for a file at `path`."""
    lines = [*_head(draft, path), *_job(draft), *_train(draft)]
    if not draft.start:
        lines += _model(draft)
    lines += [*_data(draft), *_optimizer(draft), *_checks(draft)]
    return "\n".join(lines) + "\n"


def command_of(draft: Draft, path: str) -> str:
    """Returns the arguments of `forge-run` that name the job."""
    return f"{draft.start} {path}" if draft.start else path


def reasons(draft: Draft) -> Iterator[tuple[str, str]]:
    """Yields how the sizes were chosen: subject and sentence."""
    machine, sizes, budget = draft.machine, draft.sizes, draft.budget
    how = "measured" if machine.measured else "as given"
    speed = f"{machine.flops / 1e12:.3g} TFLOP/s of {machine.precision} matrix products ({how})"
    tried = "measured by some steps" if machine.tried else "assumed"
    reached = f"training reaches about {machine.efficiency:.2g} of that ({tried})"
    yield "machine", f"{machine.name}, {speed}; {reached}"
    if machine.memory is None:
        yield "memory", "not known: if it does not suffice, set train.micro_batch_size, or give --memory"
    asked = [duration(budget.seconds)] if budget.seconds else []
    asked += [f"{amount(budget.parameters)} parameters"] if budget.parameters else []
    yield "budget", " and ".join(asked) or "three epochs of the data, as is usual for tuning"
    yield "model", _model_reason(draft)
    for remark in draft.corpus.remarks:
        yield "data", remark
    if sizes.epochs is not None:
        limit = f"at most {MOST_EPOCHS}; after {WORTH_EPOCHS}, repeating text helps little: Muennighoff et al. 2023"
        yield "epochs", f"about {sizes.epochs:.2g} of the data ({limit})"
    batch_tokens = sizes.global_batch_size * sizes.seq_len
    law = "" if draft.start else ", as the learning rate"
    yield "batch", f"{batch_tokens:,} tokens a step, by the Step Law (Li et al. 2025){law}"
    yield "length", f"{sizes.steps:,} steps are {amount(sizes.tokens)} tokens and take about {duration(sizes.seconds)}"


def _model_reason(draft: Draft) -> str:
    sizes = draft.sizes
    if draft.start:
        return f"{amount(sizes.parameters)} parameters, from {draft.start}"
    family = f"{sizes.layers} layers of dim {sizes.dim} (64 x layers) are {amount(sizes.parameters)} parameters"
    if draft.budget.parameters:
        return f"{family}, which comes nearest"
    rule = f"the deepest with {TOKENS_PER_PARAMETER} tokens a parameter (Hoffmann et al. 2022) in the budget"
    ratio = sizes.tokens / sizes.parameters
    bound = "" if ratio >= TOKENS_PER_PARAMETER * 0.75 else f"; it has {ratio:.2g}, as there is no smaller one here"
    return f"{family}: {rule} and in {WORTH_EPOCHS} epochs{bound}"


def _head(draft: Draft, path: str) -> Iterator[str]:
    yield f"# A first job, written by `forge-run init`:  forge-run {command_of(draft, path)}"
    yield "#"
    for subject, sentence in reasons(draft):
        text = textwrap.fill(f"{subject:<9}{sentence}", WIDTH - 2, subsequent_indent=" " * 9)
        yield from (f"# {line}" for line in text.splitlines())
    yield "#"
    yield "# Any key may be changed; `forge-run check` checks the job, `forge-run explain KEY` describes a key."


def source_table(corpus: Corpus) -> str:
    """Returns `[[data.sources]]` by itself."""
    return "\n".join(_table("[[data.sources]]", corpus.source)) + "\n"


def _table(header: str, keys: Sequence[Key]) -> Iterator[str]:
    """Yields a table, its comments in one column, or above where they would be too long."""
    yield from ("", header)
    for name, value, comment in keys:
        line = f"{name} = {toml(value)}"
        beside = f"{line + ' ':<{COMMENT_AT}}# {comment}"
        if comment and len(beside) > WIDTH:
            yield from (f"# {part}" for part in textwrap.wrap(comment, WIDTH - 2))
            yield line
        else:
            yield beside if comment else line


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    # Learning rates as people write them: 2.0e-05 becomes 2e-5
    if isinstance(value, float):
        return f"{value:g}" if value >= 0.01 else f"{value:.1e}".replace("e-0", "e-").replace(".0e", "e")
    # What JSON writes of strings, whole numbers, booleans and lists of them is TOML as well, but for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _job(draft: Draft) -> Iterator[str]:
    return _table("[job]", [("name", draft.name, "of the run; its folder is runs/NAME")])


def _train(draft: Draft) -> Iterator[str]:
    sizes = draft.sizes
    keys: list[Key] = [
        ("steps", sizes.steps, "optimizer steps of the whole run: longer training is better, and this is its price"),
        ("global_batch_size", sizes.global_batch_size, "sequences per optimizer step, on all ranks together"),
        ("seq_len", sizes.seq_len, "tokens of a sequence: the context length that the model learns"),
        ("precision", draft.machine.precision, "compute dtype; master weights and reductions stay float32"),
        ("grad_clip_norm", 1, "largest global norm of the gradient"),
    ]
    if sizes.micro_batch_size:
        reason = "sequences per forward pass (gradient accumulation): what fits into memory"
        # Directly below the global batch, which it divides
        keys.insert(2, ("micro_batch_size", sizes.micro_batch_size, reason))
    return _table("[train]", keys)


def _model(draft: Draft) -> Iterator[str]:
    sizes = draft.sizes
    yield from _table(
        "[model]",
        [
            ("type", "transformer", "decoder-only, as Llama and Qwen: RMSNorm, RoPE, SwiGLU"),
            ("dim", sizes.dim, "width of the residual stream"),
            ("layers", sizes.layers, "blocks, each attention and feed-forward"),
            ("tie_embeddings", True, "the output head is the embedding table: saves parameters in small models"),
        ],
    )
    yield from _table(
        "[model.attention]",
        [
            ("heads", sizes.dim // 64, "query heads of 64 features"),
            ("qk_norm", True, "normalises queries and keys: training is stable at higher learning rates"),
        ],
    )


def _data(draft: Draft) -> Iterator[str]:
    corpus = draft.corpus
    if corpus.tokenizer:
        yield from _table("[data.tokenizer]", corpus.tokenizer)
    elif not draft.start:
        keys: list[Key] = [
            ("type", "bpe", "byte-level BPE (as GPT-2's), trained on the training documents once, and cached"),
            ("vocab_size", draft.vocab_size, f"tokens: {_vocabulary_reason(draft)}"),
        ]
        # A smaller corpus is read completely without this key as well
        if corpus.text_bytes is None or corpus.text_bytes > BPE_BYTES:
            keys.append(("max_bytes", BPE_BYTES, "train it on the first documents up to this number of bytes"))
        yield from _table("[data.tokenizer]", keys)
    yield from _table("[[data.sources]]", corpus.source)
    if corpus.chats:
        yield from _table("[data.packing]", [("type", "best_fit", "whole chats in a sequence, each by itself")])


def _vocabulary_reason(draft: Draft) -> str:
    """Which bound the size of the vocabulary comes from."""
    suits = vocabulary_of_text(draft.corpus.text_bytes)
    if draft.vocab_size < suits:
        return f"the text suits {suits:,}, but embeddings are at most a quarter of the model (512 at least)"
    return "4,096 for 10 MB of text, doubled for four times as much, from 512 to 32,768"


def _optimizer(draft: Draft) -> Iterator[str]:
    sizes = draft.sizes
    loss = "next-token cross-entropy that never holds the logits of a whole batch"
    yield from _table("[loss]", [("type", "chunked_cross_entropy", loss)])
    rate = "base learning rate: low, as the weights are trained already" if draft.start else (
        "base learning rate, by the Step Law; the first key to try other values of"
    )  # fmt: skip
    yield from _table(
        "[optimizer]",
        [
            ("type", "adamw", "Adam with decoupled weight decay"),
            ("lr", sizes.lr, rate),
            ("weight_decay", 0.1, "of matrices; norms, biases and embeddings are spared"),
        ],
    )
    yield from _table(
        "[scheduler]",
        [
            ("type", "wsd", "warm-up, stable, decay: the run can be prolonged from the stable part"),
            ("warmup_steps", sizes.warmup_steps, "steps over which the learning rate rises from 0"),
            ("decay_fraction", 0.2, "share of the run over which it falls to 0"),
        ],
    )


def _checks(draft: Draft) -> Iterator[str]:
    every = max(10, draft.sizes.steps // 10)
    yield from _table("[eval]", [("interval", every, "steps between evaluations on held-out data (validation)")])
    # A forward pass costs a third of a step: evaluations are to take about a twentieth of the time at most.
    count = min(256, max(8, every * draft.sizes.global_batch_size * 3 // 20))
    sequences: Key = ("sequences", count, "at most, evenly spread over all held-out ones")
    yield from _table("[evaluations.held_out]", [sequences])
    interval = ("interval", max(50, draft.sizes.steps // 5), "steps between checkpoints, from which a run continues")
    yield from _table("[checkpoint]", [interval])
    if draft.curves:
        yield from _table("[loggers.curves]", [("file", "curves.png", "a picture of the losses, in the run folder")])
    if draft.samples and not draft.corpus.chats:
        prompts: Key = ("prompts", [draft.corpus.prompt], "the trained model continues these, and samples.txt has it")
        yield from _table("[hooks.samples]", [prompts])
