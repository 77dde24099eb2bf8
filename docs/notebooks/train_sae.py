# %% [markdown]
# A sparse autoencoder on the activations of a small model, trained while the model trains: what it explains, what the
# model loses with its reconstruction, and what latents stand for. The text has three kinds of lines, sums, words and
# dates, so that there is something to find.

# %%
import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file

from forge_core import Trainer, load_model
from forge_plugin_taps.lens import read_points

random.seed(0)
lines = []
for _ in range(1000):
    a, b = random.randrange(100), random.randrange(100)
    lines.append(f"{a} + {b} = {a + b}")
    lines.append(" ".join(random.choices(["red", "green", "blue", "yellow"], k=4)))
    lines.append(f"{random.randrange(1900, 2100)}-{random.randrange(1, 13):02}-{random.randrange(1, 29):02}")
Path("lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
job = {
    "job": {"name": "lines"},
    "train": {"steps": 240, "global_batch_size": 16, "seq_len": 40},
    "model": {"type": "transformer", "dim": 32, "layers": 2, "attention": {"heads": 2}, "ffn": {"hidden": 64}},
    "optimizer": {"type": "adamw", "lr": 1e-2},
    "scheduler": {"type": "wsd", "warmup_steps": 10},
    "data": {
        "tokenizer": {"type": "bytes"},
        "sources": [{"type": "text", "path": "lines.jsonl", "held_out_every": 20}],
    },
    "eval": {"interval": 240},
    "loggers": {"console": {"style": "off"}, "jsonl": {}},
}

# %% [markdown]
# ## Train
#
# Taps sample every position of every step from step 121 on, when the model has learned most of what it will. Every
# sample is trained on once.

# %%
point = "layers.0.resid_post"
job["parallel"] = {
    "taps": {
        "positions": "all",
        "points": [point],
        "sinks": {
            "sae": {
                "interval": 1,
                "first_step": 121,
                "latents": 128,
                "activation": {"type": "topk", "k": 4},
                "lr": 3e-3,
                "batch": 256,
                "buffer": 2048,
                "warmup": 20,
            }
        },
    }
}
job["evaluations"] = {"held_out": {}, "sae": {"sequences": 16}}
summary = Trainer(job, echo=lambda text: None).run()

# %% [markdown]
# ## How good is it
#
# `loss_recovered` compares the held-out loss with the reconstruction in place of the activation to that with zeros: 1
# means that nothing is lost.

# %%
quality = {name.rpartition("/")[2]: value for name, value in summary.evaluation.items() if name.startswith("eval/sae/")}
print({name: round(value, 3) for name, value in quality.items()})
assert quality["l0"] <= 4
assert quality["loss_recovered"] > 0.5

# %% [markdown]
# ## What latents stand for
#
# The files are those of SAELens. Here they are used by hand: latents are the 4 largest of `(x - b_dec) W_enc +
# b_enc`.

# %%
folder = summary.folder / "sae" / point
config = json.loads((folder / "cfg.json").read_text())
weights = load_file(folder / "sae_weights.safetensors")
print({name: tuple(weight.shape) for name, weight in weights.items()})
model = load_model(summary.folder)
texts = ["12 + 34 = 46", "red blue green", "1984-06-21", "7 + 88 = 95", "yellow red red", "2050-12-01"]
latents, characters = [], []
for text in texts:
    ids = torch.tensor([model.tokenizer.encode(text)])
    x = read_points(model.model, {"input_ids": ids}, [point]).values[point][0].float()
    before = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    top = before.topk(4, dim=-1)
    latents.append(torch.zeros_like(before).scatter(-1, top.indices, top.values.relu()))
    characters += [f"{text[:i]}[{text[i]}]{text[i + 1 :]}" for i in range(len(text))]
latents = torch.cat(latents)

# %% [markdown]
# The latents that are used most, with the places where each is largest.

# %%
used = (latents > 0).sum(0)
for latent in used.argsort(descending=True)[:6].tolist():
    places = latents[:, latent].argsort(descending=True)[:4]
    places = [characters[place] for place in places.tolist() if latents[place, latent] > 0]
    print(f"latent {latent:3}, at {used[latent]} of {len(latents)} positions:  " + "   ".join(places))
assert (latents > 0).sum(1).max() <= 4

# %% [markdown]
# The same from what a run has stored, with more epochs and another sparsity: `forge-run inside sae RUN
# --sae.activation.type=jumprelu --epochs 4`.
