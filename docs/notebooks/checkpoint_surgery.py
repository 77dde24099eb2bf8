# %% [markdown]
# A checkpoint is a folder with the bytes of its tensors and two files of JSON. This notebook looks into one, compares
# two, takes a part of one into another model, and changes weights by hand.

# %%
import json
import random
from pathlib import Path

import torch

from forge_core import Trainer, load_job, load_model
from forge_kit.tools.checkpoints import stored_tensors

random.seed(0)
pairs = [(random.randrange(100), random.randrange(100)) for _ in range(2000)]
texts = [f"{a} + {b} = {a + b}" for a, b in pairs]
Path("sums.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
job = {
    "job": {"name": "base"},
    "train": {"steps": 30, "global_batch_size": 16, "seq_len": 32},
    "model": {"type": "transformer", "dim": 32, "layers": 2, "attention": {"heads": 2}},
    "optimizer": {"type": "adamw", "lr": 1e-2},
    "scheduler": {"type": "constant"},
    "data": {
        "tokenizer": {"type": "bytes"},
        "sources": [{"type": "text", "path": "sums.jsonl", "held_out_every": 20}],
    },
    "checkpoint": {"interval": 15, "keep": 2},
    "loggers": {"console": {"style": "off"}, "jsonl": {}},
}


def train(**overrides):
    return Trainer(load_job(job, overrides=overrides), echo=lambda text: None).run()


base = train()

# %% [markdown]
# ## What is in one
#
# The manifest has the resolved job, the progress and the provenance; the index says where the bytes of each tensor
# lie. Neither loads anything.

# %%
first, last = sorted((base.folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
manifest = json.loads((last / "manifest.json").read_text())
print(manifest["step"], manifest["tokens"], manifest["evaluation"])

# %%
for name, (shape, dtype) in list(stored_tensors(last).items())[:6]:
    print(name, tuple(shape), dtype)

# %% [markdown]
# ## Two of them
#
# `load_model` takes a checkpoint as well as a run.

# %%
earlier, later = load_model(first), load_model(last)
weights = dict(earlier.model.named_parameters())
changes = {name: (value - weights[name]).norm().item() for name, value in later.model.named_parameters()}
print(max(changes, key=changes.__getitem__))
assert all(change > 0 for change in changes.values())

# %% [markdown]
# ## A part of one in another model
#
# A deeper model starts from the weights of the shallow one; layers that the checkpoint lacks keep their initial
# values. `[checkpoint.load]` is the job file's way: the same table takes a part (`include`, `exclude`), or an encoder
# from one run and a language model from another.

# %%
deeper = train(
    **{
        "job.name": "deeper",
        "model.layers": 3,
        "checkpoint.load": {"path": str(base.folder), "strict": False},
    }
)
scratch = train(**{"job.name": "scratch", "model.layers": 3})
losses = [round(run.metrics()[0]["loss"], 2) for run in (base, deeper, scratch)]
print("loss of the first step: shallow", losses[0], "deeper from it", losses[1], "deeper from scratch", losses[2])
assert losses[1] < losses[2] - 0.5

# %% [markdown]
# ## Weights changed by hand
#
# `model.model` is a module, so surgery is assignment. Here each layer's second head of two is taken out, and the loss
# says what it was worth.

# %%
ids = torch.tensor([later.tokenizer.encode("12 + 34 = 46")])


def loss_of(model):
    logits = model(ids)[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()


whole = loss_of(later)
with torch.no_grad():
    for layer in later.model.layers.values():
        output = layer.attention.o.weight  # (D, H * E): what comes from head 1 is its second half
        output[:, output.shape[1] // 2 :] = 0
print(f"loss {whole:.3f}, without the second heads {loss_of(later):.3f}")
assert loss_of(later) != whole
