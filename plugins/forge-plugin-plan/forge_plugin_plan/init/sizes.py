"""Sizes of a model and of its training, from a budget. Pure arithmetic: tested against built models.

The rule, in order (N parameters, D tokens of the run, S positions of a sequence):

1. A budget of time is `seconds x speed x efficiency` FLOP. A token costs 6 N + 6 layers dim S: forward and backward,
   with causal attention in the second term. The efficiency is assumed, and then measured by some steps of the model.
2. Models have dim = 64 x layers, heads of 64, SwiGLU and a tied head. The deepest is taken whose 20 N tokens (Hoffmann
   et al. 2022, "Chinchilla") fit the time, and 4 epochs of the data (Muennighoff et al. 2023: up to then, repeated
   tokens are about as good as new ones). A budget of parameters is met by the model that is nearest.
3. D is what the time allows, or else 20 N; at most 10 epochs.
4. A step has 0.58 D^0.571 tokens, and the rate is 1.79 N^-0.713 D^0.307 with N without embeddings (Li et al. 2025,
   "Step Law", arXiv 2503.04715), but at most 5e-3: it was fitted to models from 60 million parameters on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import evolve, frozen

from forge_core.contracts.errors import JobError

EFFICIENCY = 0.3
"""Share of the speed of large matrix products that training reaches, where it was not tried."""
LEAST_EFFICIENCY = 0.001
"""Lower bound, for a machine so busy, or a model so small, that a measurement is not meaningful."""
TOKENS_PER_PARAMETER = 20
WORTH_EPOCHS, MOST_EPOCHS = 4, 10
TUNING_EPOCHS = 3
"""Epochs of training that starts from a published model, without a budget of time."""
BATCH_LAW = (0.58, 0.571)
RATE_LAW = (1.79, -0.713, 0.307)
MOST_RATE = 5e-3
HEAD = 64
LEAST_LAYERS, MOST_LAYERS = 2, 128
LEAST_BATCH, LEAST_STEPS = 4, 10
STATE_BYTES = 16
"""Bytes a parameter: float32 weight, gradient and two moments of AdamW."""
ACTIVATION_BYTES = 40
"""Bytes a position, layer and feature that a forward pass keeps for the backward pass, about."""
WARMUP_SHARE = 50
TUNING_RATE = 2e-5


@frozen(kw_only=True)
class Machine:
    """A machine to train on."""

    name: str
    """For people: `2 cores`, `NVIDIA H100`."""
    flops: float
    """FLOP/s of large matrix products in `precision`."""
    precision: str
    """`bf16` or `fp32`."""
    memory: int | None = None
    """Bytes that are free; None: unknown, and then nothing is said of memory."""
    measured: bool = True
    """Whether `flops` was measured here, or is what the user said."""
    efficiency: float = EFFICIENCY
    """Share of `flops` that training reaches."""
    tried: bool = False
    """Whether `efficiency` was measured by some steps."""


@frozen(kw_only=True)
class Budget:
    """Bounds on the run; at least one is given unless the model is."""

    seconds: float | None = None
    parameters: int | None = None


@frozen(kw_only=True)
class Data:
    """The amounts that matter for sizes."""

    tokens: int | None
    """Tokens to train on, about; None: unknown, or as many as needed."""
    vocab_size: int


@frozen(kw_only=True)
class Sizes:
    """Sizes of a model and of its training."""

    layers: int
    dim: int
    parameters: int
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    """0: the whole share of a rank at once."""
    steps: int
    lr: float
    warmup_steps: int
    seconds: float
    """How long the run takes, about."""
    epochs: float | None

    @property
    def tokens(self) -> int:
        """Positions of the whole run."""
        return self.steps * self.global_batch_size * self.seq_len


def parameters(layers: int, vocab_size: int) -> int:
    """Returns the parameters of `transformer` with dim = 64 x layers, a tied head, query-key norms and SwiGLU."""
    dim = HEAD * layers
    hidden = 256 * math.ceil(8 * dim / 3 / 256)  # the default of `swiglu`
    # Attention, norms of queries and keys, SwiGLU, and the two norms of the block
    block = 4 * dim * dim + 2 * HEAD + 3 * dim * hidden + 2 * dim
    # The tied table counts once; the last term is the final norm
    return vocab_size * dim + layers * block + dim


def flops_per_token(count: int, layers: int, dim: int, seq_len: int) -> float:
    """Returns the FLOP of a token, forward and backward."""
    return 6 * count + 6 * layers * dim * seq_len


def usual_length(count: int) -> int:
    """Returns the usual positions of a sequence for a model of so many parameters."""
    return next((length for limit, length in ((5e6, 256), (5e7, 512), (5e8, 1024)) if count < limit), 2048)


def vocabulary_for(text_bytes: int | None, budget: Budget, machine: Machine) -> int:
    """Returns the size of a vocabulary to train: what suits the text, and no large part of the model.

    Its embeddings are at most a quarter of what the budget allows in parameters, at the width that such a model has.
    """
    # From FLOP = 6 N D with D = 20 N, without the term of attention
    affordable = budget.parameters or math.sqrt(_flop(budget, machine) / (6 * TOKENS_PER_PARAMETER))
    # A block has about 12 dim^2 parameters, and dim = 64 layers: N = 12 x 64^2 x layers^3
    dim = HEAD * max(LEAST_LAYERS, round((affordable / (HEAD * HEAD * 12)) ** (1 / 3)))
    return min(vocabulary_of_text(text_bytes), _vocabulary(affordable / 4 / dim))


def vocabulary_of_text(text_bytes: int | None) -> int:
    """Returns the size of a vocabulary that suits a text: 4,096 for 10 MB, doubled for four times as much."""
    # A text of unknown size counts as 1 GB, for which the largest vocabulary is chosen
    return _vocabulary(4096 * math.sqrt((text_bytes or 10**9) / 10**7))


def _vocabulary(size: float) -> int:
    """The nearest power of two, from 512 to 32,768."""
    return min(max(2 ** round(math.log2(max(size, 1))), 512), 32_768)


def bytes_per_token(vocab_size: int) -> float:
    """Returns the bytes of a token of a byte-level BPE, about: 3 for 1,024 tokens, 3.6 for 4,096, 4.8 for 65,536."""
    return 0.3 * math.log2(vocab_size)


def token_estimate(text_bytes: int | None, vocab_size: int) -> int | None:
    """Returns the tokens of a text, about; None: its size is not known."""
    return None if text_bytes is None else round(text_bytes / bytes_per_token(vocab_size))


def _flop(budget: Budget, machine: Machine) -> float:
    return math.inf if budget.seconds is None else budget.seconds * machine.flops * machine.efficiency


def choose(budget: Budget, machine: Machine, data: Data) -> Sizes:
    """Choose a model, and sizes of its training, by the rule above.

    Raises:
        JobError: the data are too few for a single batch, or the model does not fit into memory.
    """
    layers = _layers(budget, machine, data)
    count, dim = parameters(layers, data.vocab_size), HEAD * layers
    wanted = TOKENS_PER_PARAMETER * count
    sizes = plan(count, layers, dim, budget, machine, data, seq_len=usual_length(count), wanted=wanted)
    return evolve(sizes, lr=rate(count - data.vocab_size * dim, sizes.tokens))


def rate(count: int, tokens: int) -> float:
    """Returns the learning rate of AdamW, to two digits, by the parameters without embeddings and the run's tokens."""
    factor, by_count, by_tokens = RATE_LAW
    return float(f"{min(MOST_RATE, factor * count**by_count * tokens**by_tokens):.1e}")


def batch_for(tokens: float) -> float:
    """Returns the tokens of a step for a run of so many tokens."""
    factor, power = BATCH_LAW
    return float(factor * tokens**power)


def _layers(budget: Budget, machine: Machine, data: Data) -> int:
    counts = {layers: parameters(layers, data.vocab_size) for layers in range(LEAST_LAYERS, MOST_LAYERS + 1)}
    if (asked := budget.parameters) is not None:
        # Nearest by ratio, by which half the size is as far off as twice the size
        return min(counts, key=lambda layers: abs(math.log(counts[layers] / asked)))
    enough = math.inf if data.tokens is None else WORTH_EPOCHS * data.tokens
    best = LEAST_LAYERS
    for layers, count in counts.items():
        cost = flops_per_token(count, layers, HEAD * layers, usual_length(count))
        # A fifth of the memory is left for activations and other programs
        fits_memory = machine.memory is None or count * STATE_BYTES < 0.8 * machine.memory
        if TOKENS_PER_PARAMETER * count <= min(_flop(budget, machine) / cost, enough) and fits_memory:
            best = layers
    return best


def plan(
    count: int,
    layers: int,
    dim: int,
    budget: Budget,
    machine: Machine,
    data: Data,
    *,
    seq_len: int,
    wanted: float,
) -> Sizes:
    """Returns the sizes of the training of a given model, with the rate of tuning.

    Args:
        count: its parameters.
        layers: its blocks.
        dim: its width.
        budget: the time, if it is bounded.
        machine: what it is trained on.
        data: what it is trained on.
        seq_len: positions of a sequence, if the data suffice.
        wanted: tokens of the run without a budget of time.
    """
    # First, as no other size helps a model whose state does not fit
    _demand_memory(count, machine)
    cost = flops_per_token(count, layers, dim, seq_len)
    most = math.inf if data.tokens is None else MOST_EPOCHS * data.tokens
    tokens = min(wanted if budget.seconds is None else _flop(budget, machine) / cost, most)
    # A power of two has the most divisors, for micro-batches and ranks
    seq_len, batch = _shape(2 ** round(math.log2(batch_for(tokens))), seq_len, data)
    steps = max(LEAST_STEPS, round(tokens / (seq_len * batch)))
    run = steps * seq_len * batch
    return Sizes(
        layers=layers,
        dim=dim,
        parameters=count,
        seq_len=seq_len,
        global_batch_size=batch,
        micro_batch_size=_micro_batch(batch, seq_len, layers, dim, count, machine),
        steps=steps,
        # `choose` replaces it by the rate of the Step Law for a new model
        lr=TUNING_RATE,
        warmup_steps=max(1, steps // WARMUP_SHARE),
        seconds=run * cost / (machine.flops * machine.efficiency),
        epochs=None if data.tokens is None else run / data.tokens,
    )


def _shape(batch_tokens: int, seq_len: int, data: Data) -> tuple[int, int]:
    """Returns positions of a sequence and sequences of a step, of which the data hold several."""
    batch = max(LEAST_BATCH, batch_tokens // seq_len)
    # A step must not see a sequence twice, and estimates of tokens are rough: four steps at least.
    while data.tokens is not None and data.tokens < 4 * batch * seq_len:
        if batch > LEAST_BATCH:
            batch //= 2
        elif seq_len > HEAD:
            seq_len //= 2
        else:
            needed = 4 * LEAST_BATCH * HEAD
            raise JobError(f"the data have about {data.tokens:,} tokens, and {needed:,} are the least; give more text")
    return seq_len, batch


def _demand_memory(count: int, machine: Machine) -> None:
    needed = count * STATE_BYTES
    if machine.memory is not None and needed > 0.8 * machine.memory:
        free = f"{machine.memory / 1e9:.1f} GB of memory are free"
        message = f"{amount(count)} parameters take {needed / 1e9:.1f} GB to train, and {free} on {machine.name}"
        raise JobError(f"{message}; give fewer --parameters, or divide the model over ranks with [parallel.fsdp]")


def _micro_batch(batch: int, seq_len: int, layers: int, dim: int, count: int, machine: Machine) -> int:
    if machine.memory is None:
        return 0
    room = 0.8 * machine.memory - count * STATE_BYTES
    fitting = int(room / (seq_len * layers * dim * ACTIVATION_BYTES))
    if fitting >= batch:
        return 0
    # At least 1, even if no sequence seems to fit: the estimate of activations is rough
    return max(size for size in divisors(batch) if size <= max(1, fitting))


def divisors(number: int) -> Sequence[int]:
    """Returns the divisors of a number."""
    return [size for size in range(1, number + 1) if number % size == 0]


def amount(count: float) -> str:
    """`1.2 M`, `300 k`."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    """`10 minutes`, `3 hours`, `2.5 days`."""
    for scale, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.0f} seconds"
