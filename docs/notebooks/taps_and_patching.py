# %% [markdown]
# Activations of a model while it trains, and experiments on them afterwards: what taps store, the logit lens, and
# activation patching. The model learns to copy: a word, a colon, the word again.

# %%
import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file

from forge_core import Trainer, load_model
from forge_plugin_taps.lens import logit_lens, patching_effects, read_points

random.seed(0)
words = ["".join(random.choices("abcdefgh", k=4)) for _ in range(3000)]
Path("copies.jsonl").write_text("".join(json.dumps({"text": f"{word}:{word}"}) + "\n" for word in words))
job = {
    "job": {"name": "copies"},
    "train": {"steps": 250, "global_batch_size": 16, "seq_len": 40},
    "model": {"type": "transformer", "dim": 32, "layers": 2, "attention": {"heads": 4}, "ffn": {"hidden": 64}},
    "optimizer": {"type": "adamw", "lr": 1e-2},
    "scheduler": {"type": "wsd", "warmup_steps": 10},
    "data": {
        "tokenizer": {"type": "bytes"},
        "sources": [{"type": "text", "path": "copies.jsonl", "held_out_every": 20}],
    },
    "loggers": {"console": {"style": "off"}, "jsonl": {}},
}

# %% [markdown]
# ## Taps
#
# `[parallel.taps]` copies activations at some positions of every sequence, every `interval` steps, under any parallel
# layout, compiled or not. The training curve is the same with and without.

# %%
job["parallel"] = {
    "taps": {
        "interval": 50,
        "positions": 8,
        "points": ["layers.*.resid_post"],
        "gradients": ["layers.*.resid_post"],
        "sinks": {"store": {}},
    }
}
folder = Trainer(job, echo=lambda text: None).run().folder

# %% [markdown]
# Each sampled step is a folder: a file of safetensors for each point, its gradients, and the tokens beside them, in
# one order whatever the layout.

# %%
step = folder / "taps/step-50"
print(sorted(path.name for path in step.iterdir()))
tokens = load_file(step / "tokens.safetensors")
print({name: column[:8].tolist() for name, column in tokens.items()})

# %%
for number in (50, 150, 250):
    norms = []
    for layer in range(2):
        name = f"layers.{layer}.resid_post"
        norms.append(load_file(folder / f"taps/step-{number}/{name}.safetensors")[name].norm(dim=-1).mean().item())
    print(f"step {number}: norm of the residual stream", [round(norm, 1) for norm in norms])

# %% [markdown]
# ## The logit lens
#
# The residual stream after each layer through the final norm and the head: what would the model predict if it ended
# there?

# %%
model = load_model(folder)
encode, decode = model.tokenizer.encode, model.tokenizer.decode
lens = logit_lens(model.model, encode("bead:be"), top=3)
for name, ids, probabilities in zip(lens.names, lens.top[:, -1], lens.probabilities[:, -1], strict=True):
    guesses = [
        f"{decode([id_])!r} {share:.2f}" for id_, share in zip(ids.tolist(), probabilities.tolist(), strict=True)
    ]
    print(f"{name:20}", *guesses)
assert lens.divergence[-1].abs().max() < 1e-5  # the last row is the model's own prediction

# %% [markdown]
# `forge-run inside lens RUN --prompt "bead:be"` prints the same and draws it.
#
# ## Activation patching
#
# Two prompts of one length that differ in one letter have different answers. Each activation of the first is put into
# a run of the second; the effect is 1 where that brings the first answer back. So it shows where the letter is, and
# where it is read.

# %%
clean, corrupted = encode("bead:be"), encode("behd:be")
effects = patching_effects(model.model, clean, corrupted, answer=ord("a"), other=ord("h"))
print("point               ", "  ".join(f"{decode([id_])!r:>5}" for id_ in clean))
for point, row in zip(effects.points, effects.effects.tolist(), strict=True):
    print(f"{point:20}", "  ".join(f"{effect:5.2f}" for effect in row))

# %% [markdown]
# Before the first layer, only the letter itself matters; its activation there is all that differs.

# %%
first = effects.effects[0]
assert abs(first[2] - 1) < 1e-3
assert first[[0, 1, 3, 4]].abs().max() < 1e-3

# %% [markdown]
# ## Heads taken out
#
# `read_points` runs the model with changes at any points. Here each head of the first layer is silenced, by its place
# in `z` (B, S, H, E), and the last position's prediction compared.

# %%
ids = torch.tensor([clean])


def answer_logit(changes):
    hidden = read_points(model.model, {"input_ids": ids}, (), changes).hidden
    with torch.no_grad():
        return model.model.head.logits(hidden)[0, -1].log_softmax(-1)[ord("a")].item()


whole = answer_logit({})
for layer in range(2):
    for head in range(4):

        def silence(z, head=head):
            z = z.clone()
            z[:, :, head] = 0
            return z

        change = answer_logit({f"layers.{layer}.z": silence}) - whole
        print(f"layer {layer} head {head}: log-probability of 'a' {change:+.2f}")
