# %% [markdown]
# What is inside a trained model: its parts and parameters, their sizes, how far training moved them, and what the
# model expects next, token by token. First a small model, trained on sums of two numbers, in about three seconds.

# %%
import json
import random
from collections import Counter
from pathlib import Path

import torch

from forge_core import Trainer, load_model

random.seed(0)
pairs = [(random.randrange(100), random.randrange(100)) for _ in range(2000)]
texts = [f"{a} + {b} = {a + b}" for a, b in pairs]
Path("sums.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
job = {
    "job": {"name": "sums"},
    "train": {"steps": 40, "global_batch_size": 16, "seq_len": 32},
    "model": {"type": "transformer", "dim": 32, "layers": 3, "attention": {"heads": 2}},
    "optimizer": {"type": "adamw", "lr": 1e-2},
    "scheduler": {"type": "wsd", "warmup_steps": 5},
    "data": {
        "tokenizer": {"type": "bytes"},
        "sources": [{"type": "text", "path": "sums.jsonl", "held_out_every": 20}],
    },
    "checkpoint": {"at_start": True, "keep": 2},
}
folder = Trainer(job, echo=lambda text: None).run().folder
model = load_model(folder)

# %% [markdown]
# ## Its parts
#
# `model.model` is an ordinary `nn.Module`: print it, walk through it, take parts of it. The names of its parameters
# are those that patterns in job files mean (`freeze`, `[[optimizer.groups]]`, `[checkpoint.load]`).

# %%
print(model.model)

# %%
sizes: Counter[str] = Counter()
for name, parameter in model.model.named_parameters():
    part = name.split(".")
    sizes[".".join(part[2:-1]) if part[0] == "layers" else part[0]] += parameter.numel()
for part, size in sizes.most_common():
    print(f"{part:20} {size:7,}  {size / sizes.total():6.1%}")

# %% [markdown]
# ## How far training moved them
#
# `checkpoint.at_start` kept the initial weights, so two models can be compared name by name. `forge-run checkpoints
# RUN diff` prints such a table for any two checkpoints.

# %%
initial = load_model(folder / "checkpoints/step-0")
before = dict(initial.model.named_parameters())
moved = {
    name: ((after - before[name]).norm() / before[name].norm()).item()
    for name, after in model.model.named_parameters()
    if before[name].norm() > 0
}
for name in sorted(moved, key=moved.__getitem__, reverse=True)[:5]:
    print(f"{moved[name]:7.2f} of its norm  {name}")
assert min(moved.values()) > 0

# %% [markdown]
# ## What it expects next
#
# Called with ids, the model returns logits in float32, a row for each position, about the token after it. The
# surprise of a token is the negative logarithm of the probability that it had, in bits.

# %%
text = "12 + 34 = 46"
ids = torch.tensor(model.tokenizer.encode(text))
surprise = -model(ids)[:-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1) / torch.log(torch.tensor(2.0))
for id_, bits in zip(ids[1:].tolist(), surprise.tolist(), strict=True):
    print(f"{model.tokenizer.decode([id_])!r:6} {bits:5.2f} {'#' * round(4 * bits)}")

# %% [markdown]
# Digits surprise, since the numbers are random; the signs between them do not.

# %%
signs = [bits for id_, bits in zip(ids[1:].tolist(), surprise.tolist(), strict=True) if chr(id_) in "+="]
digits = [bits for id_, bits in zip(ids[1:].tolist(), surprise.tolist(), strict=True) if chr(id_).isdigit()]
assert max(signs) < sum(digits) / len(digits)

# %% [markdown]
# ## What it keeps close together
#
# Cosines of embeddings. After so short a training, digits already resemble each other more than they resemble
# letters.

# %%
embedding = torch.nn.functional.normalize(model.model.embedding.weight.detach().float(), dim=-1)
digit_ids, letter_ids = [list(text.encode()) for text in ("0123456789", "abcdefghij")]
among_digits = (embedding[digit_ids] @ embedding[digit_ids].T).mean().item()
to_letters = (embedding[digit_ids] @ embedding[letter_ids].T).mean().item()
print(f"digits among themselves {among_digits:.2f}, digits and letters {to_letters:.2f}")
assert among_digits > to_letters
