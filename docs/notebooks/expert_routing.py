# %% [markdown]
# Where a mixture of experts sends its tokens: the load of each expert while training goes on, and which bytes each of
# them serves in the end. The text has two languages, digits and letters, so that there is something to divide.

# %%
import json
import random
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from forge_core import Trainer, load_model

random.seed(0)
lines = []
for _ in range(1500):
    number = random.randrange(1000)
    lines.append(f"{number} {number + 1} {number + 2} {number + 3}")
    lines.append(" ".join(random.choices(["ba", "du", "ki", "lo", "me"], k=6)))
Path("mixed.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
experts = 4
job = {
    "job": {"name": "experts"},
    "train": {"steps": 40, "global_batch_size": 16, "seq_len": 48},
    "model": {
        "type": "transformer",
        "dim": 32,
        "layers": 2,
        "attention": {"heads": 2},
        "ffn": {"type": "moe", "experts": experts, "hidden": 32, "router": {"type": "softmax_topk", "top_k": 1}},
    },
    "optimizer": {"type": "adamw", "lr": 5e-3},
    "scheduler": {"type": "constant"},
    "data": {
        "tokenizer": {"type": "bytes"},
        "sources": [{"type": "text", "path": "mixed.jsonl", "held_out_every": 20}],
    },
    "loggers": {"console": {"style": "off"}, "jsonl": {}},
}
summary = Trainer(job, echo=lambda text: None).run()

# %% [markdown]
# ## The load while it trains
#
# Lines of metrics have, under `counts`, how many tokens of the global batch each expert of each layer received.

# %%
rows = [row for row in summary.metrics() if "counts" in row]
loads = torch.tensor([row["counts"]["moe/load"]["1"] for row in rows], dtype=torch.float)  # of layer 1
shares = loads / loads.sum(1, keepdim=True)
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
image = axes.imshow(shares.T.numpy(), aspect="auto", cmap="magma", vmin=0)
axes.set(xlabel="step", ylabel="expert of layer 1", yticks=range(experts))
figure.colorbar(image, label="share of tokens")
figure.savefig("load.png", dpi=150)
print("last step:", [f"{share:.0%}" for share in shares[-1].tolist()])
assert torch.allclose(shares.sum(1), torch.ones(len(shares)))

# %% [markdown]
# ## Which bytes go where
#
# A router is a module like any other, and returns the weights and the numbers of each token's experts, (B, S, K)
# each. A forward hook sees them.

# %%
model = load_model(summary.folder)
router = model.model.layers["1"].ffn.router
chosen = []
handle = router.register_forward_hook(lambda module, arguments, result: chosen.append(result[1]))
text = "12 13 14 15 16 17 ba du ki lo me ba du 997 998 999"
model(model.tokenizer.encode(text))
handle.remove()
[choices] = chosen
for expert in range(experts):
    served = "".join(
        character for character, choice in zip(text, choices.flatten().tolist(), strict=True) if choice == expert
    )
    print(f"expert {expert}: {served}")

# %% [markdown]
# The same as shares: how much of each kind of byte every expert receives.

# %%
kinds = {"digits": str.isdigit, "letters": str.isalpha, "spaces": str.isspace}
table = torch.tensor(
    [
        [
            sum(kind(c) for c, choice in zip(text, choices.flatten().tolist(), strict=True) if choice == expert)
            for expert in range(experts)
        ]
        for kind in kinds.values()
    ],
    dtype=torch.float,
)
for kind, row in zip(kinds, table / table.sum(1, keepdim=True), strict=True):
    print(f"{kind:8}", " ".join(f"{share:4.0%}" for share in row.tolist()))
assert table.sum() == len(text)
