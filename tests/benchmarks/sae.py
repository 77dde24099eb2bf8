"""Sparse autoencoders of forge-plugin-sae beside dictionary_learning and SAELens, on the same activations.

    python -m pip install --no-deps --target PEERS dictionary-learning sae-lens 'transformer-lens<4' einops jaxtyping \\
        beartype better-abc fancy-einsum wadler-lindig simple-parsing docstring-parser typeguard babe tenacity
    OMP_NUM_THREADS=1 PYTHONPATH=PEERS python tests/benchmarks/sae.py [--steps 1000] [--activations STORE.npy]

Two tables, in float64. *Training*: from equal weights on equal batches in equal order, `loss` (mean of the last 50
updates), explained variance and active latents of a batch that none was trained on, dead latents, milliseconds an
update; `apart` is the largest relative difference of the loss from Forge's over all updates. *Loading*: the largest
difference of reconstruction and latents between Forge's module and what SAELens' loader makes of its files.

Activations are those of a sparse dictionary of 128 directions in 32 dimensions unless a file has others. Modules that
the peers import and do not use here (wandb, nnsight) need not be installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_plugin_sae import L1, BatchTopK, JumpReLU, SparsityComponent, TopK
from forge_plugin_sae.model import SparseCoder, load, save
from forge_plugin_sae.settings import Training
from forge_plugin_sae.training import Trainer

LATENTS, K, ROWS, DEAD = 512, 4, 256, 2048
RATE = 1e-3


def pretend(name: str, *classes: str) -> None:
    """Make `import name` work, for a module that a peer imports and that nothing here calls."""
    if importlib.util.find_spec(name) is None:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update({cls: type(cls, (), {}) for cls in classes})
        sys.modules[name] = module


pretend("wandb")
pretend("nnsight", "LanguageModel")

from dictionary_learning.trainers.batch_top_k import BatchTopKTrainer  # noqa: E402
from dictionary_learning.trainers.top_k import TopKTrainer  # noqa: E402
from sae_lens import SAE  # noqa: E402
from sae_lens.saes.batchtopk_sae import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig  # noqa: E402
from sae_lens.saes.jumprelu_sae import JumpReLUTrainingSAE, JumpReLUTrainingSAEConfig  # noqa: E402
from sae_lens.saes.sae import TrainStepInput  # noqa: E402
from sae_lens.saes.standard_sae import StandardTrainingSAE, StandardTrainingSAEConfig  # noqa: E402
from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig  # noqa: E402
from sae_lens.saes.transcoder import JumpReLUTranscoder, Transcoder  # noqa: E402

# --- activations -----------------------------------------------------------------------------------------------------


def batches(path: Path | None, count: int) -> list[Tensor]:
    """Batches of mean squared norm 1."""
    if path is not None:
        rows = torch.from_numpy(np.load(path)).double().flatten(1)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        rows = rows[order[torch.arange(count * ROWS) % len(rows)]]
    else:
        size: Any = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
        directions = torch.nn.functional.normalize(torch.randn(128, 32, **size), dim=-1)
        active = torch.rand(count * ROWS, 128, **size) < torch.linspace(0.12, 0.004, 128)
        rows = (active * torch.rand(count * ROWS, 128, **size)) @ directions + 0.05
    return list((rows * rows.square().sum(-1).mean().rsqrt()).split(ROWS))


# --- the three, behind one face --------------------------------------------------------------------------------------


class Ours:
    """A `Trainer`, fed with batches."""

    def __init__(self, activation: SparsityComponent, first: Tensor, **changes: Any) -> None:
        keys: Any = {"latents": LATENTS, "lr": RATE, "warmup": 0, "batch": ROWS, "buffer": ROWS, **changes}
        settings = Training(activation=activation, dead_after=DEAD, precision="fp64", **keys)
        self.trainer = Trainer(settings, first.shape[1], None, "0", torch.device("cpu"))
        self.trainer.start_from(first)
        self.coder = self.trainer.coder

    def update(self, step: int, x: Tensor) -> float:
        return float(self.trainer.update(x, x))

    def encode(self, x: Tensor) -> Tensor:
        return self.coder.activation(self.coder.pre_activations(x))

    def decode(self, latents: Tensor) -> Tensor:
        return self.coder.decode(latents)

    def dead(self) -> int:
        return int(self.trainer.dead.sum())


class DictionaryLearning:
    """A trainer of dictionary_learning, whole, from the weights of Forge's."""

    def __init__(self, kind: type, ours: Ours) -> None:
        width = ours.coder.W_enc.shape[0]
        keys: Any = {"layer": 0, "lm_name": "none", "device": "cpu", "lr": RATE, "warmup_steps": 0, "k": K}
        self.peer = kind(activation_dim=width, dict_size=LATENTS, steps=1 << 30, threshold_start_step=0, **keys)
        self.peer.dead_feature_threshold = DEAD
        self.peer.ae.encoder.weight.data.copy_(ours.coder.W_enc.T)
        self.peer.ae.decoder.weight.data.copy_(ours.coder.W_dec.T)

    def update(self, step: int, x: Tensor) -> float:
        return float(self.peer.update(step, x))

    def encode(self, x: Tensor) -> Tensor:
        return self.peer.ae.encode(x, use_threshold=False)

    def decode(self, latents: Tensor) -> Tensor:
        return self.peer.ae.decode(latents)

    def dead(self) -> int:
        return int((self.peer.num_tokens_since_fired >= DEAD).sum())


class SAELens:
    """A training module of SAELens (its forward pass, losses and gradients), stepped as the other two step.

    SAELens' own trainer does not keep decoder rows at unit norm.
    """

    def __init__(self, kind: type, config: type, ours: Ours, betas: tuple[float, float], **keys: Any) -> None:
        self.sae = kind(config(d_in=ours.coder.W_enc.shape[0], d_sae=LATENTS, dtype="float64", **keys))
        self.optimizer = torch.optim.Adam(self.sae.parameters(), RATE, betas)
        self.idle = torch.zeros(LATENTS)
        for name in ("W_enc", "W_dec", "b_enc", "b_dec"):
            getattr(self.sae, name).data.copy_(getattr(ours.coder, name))
        if hasattr(self.sae, "threshold"):  # it keeps thresholds in float32, and Forge in the precision of the rest
            self.sae._parameters["threshold"] = torch.nn.Parameter(self.sae.threshold.detach().double())
            self.optimizer = torch.optim.Adam(self.sae.parameters(), RATE, betas)

    def update(self, step: int, x: Tensor) -> float:
        out = self.sae.training_forward_pass(TrainStepInput(x, {"l0": 0.02, "l1": 0.02}, None, step, False))
        out.loss.backward()
        decoder = self.sae.W_dec
        decoder.grad -= (decoder.grad * decoder.detach()).sum(-1, keepdim=True) * decoder.detach()
        torch.nn.utils.clip_grad_norm_(self.sae.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        decoder.data /= decoder.data.norm(dim=-1, keepdim=True)
        self.idle = torch.where((out.feature_acts > 0).any(0), 0.0, self.idle + len(x))
        return float(out.loss.detach())

    def encode(self, x: Tensor) -> Tensor:
        return self.sae.encode(x)

    def decode(self, latents: Tensor) -> Tensor:
        return self.sae.decode(latents)

    def dead(self) -> int:
        return int((self.idle >= DEAD).sum())


def contests(first: Tensor) -> Iterator[tuple[str, Ours, dict[str, Any]]]:
    """(what is trained, ours, peers by name), all from the same weights."""
    adam, jump = (0.9, 0.999), (0.0, 0.999)
    topk: Any = {"k": K, "rescale_acts_by_decoder_norm": False, "aux_loss_coefficient": 0.0}
    ours = Ours(TopK(k=K), first)
    yield "topk", ours, {"dictionary_learning": DictionaryLearning(TopKTrainer, ours)}
    ours = Ours(BatchTopK(k=K), first)
    yield "batch_topk", ours, {"dictionary_learning": DictionaryLearning(BatchTopKTrainer, ours)}
    ours = Ours(TopK(k=K, auxiliary=0), first)
    yield "topk, no aux", ours, {"SAELens": SAELens(TopKTrainingSAE, TopKTrainingSAEConfig, ours, adam, **topk)}
    ours = Ours(BatchTopK(k=K, auxiliary=0), first)
    peer = SAELens(BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig, ours, adam, **topk)
    yield "batch, no aux", ours, {"SAELens": peer}
    ours = Ours(JumpReLU(target_l0=0, coefficient=0.02, bandwidth=0.05, threshold=0.01), first, betas=jump)
    yield "jumprelu", ours, {"SAELens": SAELens(JumpReLUTrainingSAE, JumpReLUTrainingSAEConfig, ours, jump)}
    ours = Ours(L1(coefficient=0.02), first)
    yield "l1", ours, {"SAELens": SAELens(StandardTrainingSAE, StandardTrainingSAEConfig, ours, adam)}


# --- tables ----------------------------------------------------------------------------------------------------------


def train(who: Any, data: list[Tensor]) -> tuple[list[float], float]:
    """The loss of every update, and milliseconds of each."""
    begin = time.perf_counter()
    losses = [who.update(number, x.clone()) for number, x in enumerate(data)]
    return losses, (time.perf_counter() - begin) / len(losses) * 1000


@torch.no_grad()
def quality(who: Any, x: Tensor) -> tuple[float, float]:
    """Explained variance and active latents."""
    latents = who.encode(x)
    error = x - who.decode(latents)
    explained = 1 - error.square().sum() / (x - x.mean(0)).square().sum()
    return float(explained), float((latents > 0).sum(-1).double().mean())


def training(data: list[Tensor]) -> list[tuple[str, Ours]]:
    """Print the first table; returns ours."""
    heads = ("loss", "explained", "L0", "dead", "ms", "apart")
    print(f"{'':14}{'':20}" + "".join(f"{head:>11}" for head in heads))
    trained = []
    for name, ours, peers in contests(data[0]):
        own: list[float] = []
        for who, each in {"Forge": ours, **peers}.items():
            losses, ms = train(each, data[:-1])
            own = own or losses
            apart = max(abs(a - b) / b for a, b in zip(losses, own, strict=True))
            explained, l0 = quality(each, data[-1])
            mean = sum(losses[-50:]) / len(losses[-50:])
            print(f"{name:14}{who:20}{mean:11.6f}{explained:11.6f}{l0:11.3f}{each.dead():11}{ms:11.2f}{apart:11.1e}")
        trained.append((name, ours))
    return trained


@torch.no_grad()
def loading(trained: list[tuple[str, Ours]], x: Tensor) -> None:
    """Print the second table."""
    print(f"\n{'':14}{'class in SAELens':26}{'reconstruction':>16}{'latents':>16}")
    for name, ours in trained:
        ours.coder.eval().scale_in.fill_(0.5)
        ours.coder.scale_out.fill_(0.5)
        compare(name, ours.coder, x)
    for kind, cls in ((JumpReLU(), JumpReLUTranscoder), (L1(), Transcoder)):
        coder = SparseCoder(kind.activation(LATENTS), x.shape[1], LATENTS, 24).double()
        coder.draw(torch.Generator().manual_seed(0))
        coder.scale_in.fill_(0.5)
        compare("transcoder", coder, x, cls)


def compare(name: str, coder: SparseCoder, x: Tensor, kind: type = SAE) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(coder, Path(folder), {"hook_name": "layers.0.resid_post"})
        peer = kind.load_from_disk(folder)
        again = load(Path(folder))
    latents = (peer.encode(x) - again.encode(x)).abs().max()
    apart = max(float((peer(x) - module(x)).abs().max()) for module in (coder, again))
    print(f"{name:14}{type(peer).__name__:26}{apart:16.1e}{float(latents):16.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--activations", type=Path, help="a .npy file of rows, in place of made ones")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    data = batches(options.activations, options.steps + 1)
    loading(training(data), data[-1])


if __name__ == "__main__":
    main()
