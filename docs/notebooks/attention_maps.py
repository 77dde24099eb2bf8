# %% [markdown]
# What the heads of a model attend to, from queries and keys as the kernel receives them: the kernel that runs is left
# as it is. The model learns to continue a sequence of letters that repeats, so that some head must look at what
# followed a letter before.

# %%
import json
import random
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from forge_core import Trainer, load_model
from forge_plugin_taps.lens import attention_maps

random.seed(0)
texts = ["".join(random.sample("abcdefghijklmnop", k=8)) * 2 for _ in range(4000)]
Path("repeats.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
job = {
    "job": {"name": "repeats"},
    "train": {"steps": 250, "global_batch_size": 16, "seq_len": 34},
    "model": {"type": "transformer", "dim": 32, "layers": 2, "attention": {"heads": 2}, "ffn": {"hidden": 64}},
    "optimizer": {"type": "adamw", "lr": 1e-2},
    "scheduler": {"type": "wsd", "warmup_steps": 10},
    "data": {
        "tokenizer": {"type": "bytes"},
        "sources": [{"type": "text", "path": "repeats.jsonl", "held_out_every": 20}],
    },
    "loggers": {"console": {"style": "off"}, "jsonl": {}},
}
folder = Trainer(job, echo=lambda text: None).run().folder
model = load_model(folder)

# %% [markdown]
# ## Maps
#
# (layers, heads, queries, keys). Every row of a map sums to 1, and no query attends to a later key.

# %%
text = "hgfebacd" * 2
maps = attention_maps(model.model, model.tokenizer.encode(text))
weights = maps.weights
print(tuple(weights.shape))
assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
assert weights.triu(1).abs().max() == 0

# %%
figure, axes = plt.subplots(2, 2, figsize=(7, 7), layout="constrained")
for layer in range(2):
    for head in range(2):
        axis = axes[layer, head]
        axis.imshow(weights[layer, head].numpy(), cmap="magma", vmin=0, vmax=1)
        axis.set(title=f"layer {layer}, head {head}", xticks=range(16), yticks=range(16))
        axis.set_xticklabels(text)
        axis.set_yticklabels(text)
figure.savefig("attention.png", dpi=120)

# %% [markdown]
# ## What each head does
#
# In the second half of the text, three places are of interest: the token before, the same letter in the first half,
# and the one after that, which is the answer (Olsson et al. 2022 call a head that looks there an induction head).

# %%
queries = torch.arange(8, 15)
places = {"before": queries - 1, "same letter": queries - 8, "after the same": queries - 7}
for layer in range(2):
    for head in range(2):
        shares = {name: weights[layer, head][queries, keys].mean().item() for name, keys in places.items()}
        print(f"layer {layer} head {head}:", {name: f"{share:.0%}" for name, share in shares.items()})

# %% [markdown]
# The repetition always comes eight letters later, so the first layer finds the answer by distance alone; with lengths
# that vary, it takes two layers.
#
# `forge-run inside attention RUN --prompt TEXT` draws the maps, with the mean entropy of each head. Attention while
# training goes on, of sampled queries under any layout, is the point `layers.N.pattern` of `[parallel.taps]`.
