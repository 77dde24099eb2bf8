"""Sparse autoencoders and transcoders as modules, and as files that SAELens loads.

N rows, D features of the input, E of the target (E = D of an autoencoder), F latents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forge_core.contracts.errors import ForgeError
from forge_plugin_sae.activation_modules import Activation, JumpReLUActivation, L1Activation, TopKActivation

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
"""Names of the files, as SAELens has them."""
TRANSCODER = {"standard": "transcoder", "jumprelu": "jumprelu_transcoder", "topk": "topk_transcoder"}
"""Architecture of an autoencoder -> architecture of a transcoder with the same activation. SAELens has no
`topk_transcoder`."""


class SparseCoder(nn.Module):
    """(N, D) activations -> (N, F) latents -> (N, E) activations: an autoencoder, or a transcoder to another point.

    latents = activation((x - b_dec) W_enc + b_enc), without b_dec in a transcoder; output = latents W_dec + b_dec. Rows
    of W_dec have unit norm. Inputs and targets are multiplied by `scale_in` and `scale_out` first, and outputs divided;
    all in the dtype of the weights.
    """

    scale_in: Tensor
    scale_out: Tensor

    def __init__(self, activation: Activation, width: int, latents: int, target_width: int | None = None) -> None:
        """Make the module with zeros for weights.

        Args:
            activation: from a component of kind `sparsity`.
            width: D.
            latents: F.
            target_width: E of a transcoder; None: an autoencoder.
        """
        super().__init__()
        self.transcodes = target_width is not None
        outputs = width if target_width is None else target_width
        self.activation = activation
        self.W_enc = nn.Parameter(torch.zeros(width, latents))
        self.b_enc = nn.Parameter(torch.zeros(latents))
        self.W_dec = nn.Parameter(torch.zeros(latents, outputs))
        self.b_dec = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("scale_in", torch.ones(()))
        self.register_buffer("scale_out", torch.ones(()))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Draw the directions of latents, uniformly on the sphere; an autoencoder's encoder is its decoder's transpose.

        Args:
            generator: on the CPU, so that every device draws the same.
        """
        # float64 for both precisions, so that float32 weights are the rounded float64 ones
        size: Any = {"generator": generator, "dtype": torch.float64}
        decoder = nn.functional.normalize(torch.randn(self.W_dec.shape, **size), dim=-1)
        encoder = decoder.T
        if self.transcodes:
            encoder = nn.functional.normalize(torch.randn(self.W_enc.shape, **size), dim=0)
        self.W_dec.copy_(decoder)
        self.W_enc.copy_(encoder)

    def pre_activations(self, x_ND: Tensor) -> Tensor:
        """(N, D) scaled inputs -> (N, F)."""
        return (x_ND if self.transcodes else x_ND - self.b_dec) @ self.W_enc + self.b_enc

    def decode(self, latents_NF: Tensor) -> Tensor:
        """(N, F) -> (N, E) scaled outputs."""
        return latents_NF @ self.W_dec + self.b_dec

    def encode(self, x_ND: Tensor) -> Tensor:
        """(N, D) activations of any dtype -> (N, F) latents, as after training: each row by itself."""
        return self.activation.infer(self.pre_activations(x_ND.to(self.W_enc.dtype) * self.scale_in))  # type: ignore[no-any-return]

    def forward(self, x_ND: Tensor) -> Tensor:
        """(…, D) activations of the model -> (…, E), of the same dtype: what stands in for the target."""
        return (self.decode(self.encode(x_ND)) / self.scale_out).to(x_ND.dtype)

    def folded(self) -> dict[str, Tensor]:
        """Weights for inputs and targets as they are in the model: the scales are in them, and W_dec has unit norm.

        Latents are then in units of the target, 1 / scale_out of those in training.
        """
        scale, ratio = self.scale_out, self.scale_in / self.scale_out
        weights = {
            "W_enc": self.W_enc * ratio,
            "b_enc": self.b_enc / scale,
            "W_dec": self.W_dec,
            "b_dec": self.b_dec / scale,
        }
        if (threshold := self.activation.threshold_of(len(self.b_enc))) is not None:
            # Compared with pre-activations, which the folded weights divide by the same scale
            weights["threshold"] = threshold / scale
        return {name: weight.detach().to("cpu").contiguous() for name, weight in weights.items()}


def save(coder: SparseCoder, folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write `cfg.json` and `sae_weights.safetensors`, as SAELens reads them; the folder appears once both are whole.

    Args:
        coder: trained.
        folder: is replaced if it is there.
        metadata: plain values that say what was trained on what (`hook_name`, …).
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = coder.folded()
    name, own = coder.activation.architecture or type(coder.activation).__name__, coder.activation.settings()
    width, latents = coder.W_enc.shape
    # As SAELens reads it; the scales are folded into the weights, so that no normalisation is to be applied
    config: dict[str, Any] = {
        "architecture": TRANSCODER.get(name, name) if coder.transcodes else name,
        "d_in": width,
        "d_sae": latents,
        "dtype": str(coder.W_enc.dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": not coder.transcodes,
        "normalize_activations": "none",
        "reshape_activations": "none",
        **own,
        "metadata": dict(metadata),
    }
    if coder.transcodes:
        config["d_out"] = coder.W_dec.shape[1]
    # The weights first: a folder without its cfg.json is no autoencoder for any reader
    for file, write in ((WEIGHTS, lambda p: save_file(weights, p)), (CONFIG, lambda p: p.write_text(_json(config)))):
        part = folder / f"{file}.part"
        write(part)
        part.replace(folder / file)


def load(folder: Path, device: torch.device | str = "cpu") -> SparseCoder:
    """The autoencoder or transcoder in a folder, written by `save` or by SAELens.

    Raises:
        ForgeError: the folder holds none, or one of an architecture or normalisation that is not known here.
    """
    try:
        # To the host: safetensors itself knows some devices only
        config, weights = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise ForgeError(f"{folder} holds no sparse autoencoder ({CONFIG} and {WEIGHTS}): {error}") from error
    # Architectures of autoencoders and of transcoders, by the activation that both have
    known = {**{kind: kind for kind in TRANSCODER}, **{transcoder: kind for kind, transcoder in TRANSCODER.items()}}
    name = config.get("architecture")
    if name not in known:
        raise ForgeError(f"{folder / CONFIG}: the architecture is {name!r}; known are {', '.join(sorted(known))}")
    _refuse(folder, config, name)
    transcodes = name in TRANSCODER.values()
    activation = _activation(known[name], config, weights.get("threshold"))
    coder = SparseCoder(activation, config["d_in"], config["d_sae"], config["d_out"] if transcodes else None)
    state = {"activation.threshold" if name == "threshold" else name: value for name, value in weights.items()}
    # Before the weights are copied in, which would otherwise be rounded to float32
    coder.to(device, weights["W_enc"].dtype)
    # The scales are in the weights, and have no place in the file
    problem = coder.load_state_dict(state, strict=False)
    if wrong := [*problem.unexpected_keys, *({*problem.missing_keys} - {"scale_in", "scale_out"})]:
        raise ForgeError(f"{folder / WEIGHTS}: tensors that {name} has not, or lacks: {', '.join(sorted(wrong))}")
    return coder.requires_grad_(False).eval()


def _activation(kind: str, config: Mapping[str, Any], threshold: Tensor | None) -> Activation:
    if kind == "topk":
        return TopKActivation(config["k"])
    if threshold is None:
        # The coefficient is of training, which a loaded autoencoder does not continue.
        return L1Activation(0.0)
    settings: Any = SimpleNamespace(bandwidth=0.0, target_l0=0.0, coefficient=0.0, threshold=0.0)  # for training only
    return JumpReLUActivation(len(threshold), settings)


def _refuse(folder: Path, config: Mapping[str, Any], name: str) -> None:
    """Raise for settings of SAELens that would change what the weights mean."""
    # A transcoder's decoder is for another point, whose bias has no meaning at the input
    shift = name not in TRANSCODER.values()
    wanted = {
        "normalize_activations": ("none", None),
        "reshape_activations": ("none", None),
        "apply_b_dec_to_input": (shift, None),
        "rescale_acts_by_decoder_norm": (False, None),
    }
    for key, values in wanted.items():
        if config.get(key) not in values:
            raise ForgeError(f"{folder / CONFIG}: {key} = {config[key]!r} is not supported, only {values[0]!r}")


def _json(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2) + "\n"
