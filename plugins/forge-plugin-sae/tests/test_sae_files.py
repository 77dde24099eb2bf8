"""Files as SAELens reads and writes them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.contracts.errors import ForgeError
from forge_plugin_sae import L1, BatchTopK, JumpReLU, TopK
from forge_plugin_sae.activation_modules import Activation
from forge_plugin_sae.model import SparseCoder, load, save
from forge_testing.refusals import naming

KINDS = {
    "topk": (TopK(k=2), "topk", "topk_transcoder"),
    "batch_topk": (BatchTopK(k=2), "jumprelu", "jumprelu_transcoder"),
    "jumprelu": (JumpReLU(threshold=0.1), "jumprelu", "jumprelu_transcoder"),
    "l1": (L1(), "standard", "transcoder"),
}


def coder_of(activation, target_width=None):
    coder = SparseCoder(activation.activation(12), 5, 12, target_width).double()
    coder.draw(torch.Generator().manual_seed(0))
    coder.train().activation(torch.ones(3, 12).double())  # batch_topk learns a threshold
    coder.scale_in.fill_(0.5)
    coder.scale_out.fill_(0.5 if target_width is None else 4.0)
    for bias in (coder.b_enc, coder.b_dec):
        bias.data.normal_(generator=torch.Generator().manual_seed(1))
    return coder.eval()


@pytest.mark.parametrize("target_width", [None, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_for_activations_as_they_are(tmp_path, kind, target_width):
    activation, *architectures = KINDS[kind]
    coder, x = (
        coder_of(activation, target_width),
        torch.randn(9, 5, generator=torch.Generator().manual_seed(2)).double(),
    )
    save(coder, tmp_path / "sae", {"hook_name": "layers.1.resid_post"})
    config = json.loads((tmp_path / "sae/cfg.json").read_text())
    assert config["architecture"] == architectures[target_width is not None]
    assert config["apply_b_dec_to_input"] == (target_width is None)
    assert {key: config[key] for key in ("d_in", "d_sae", "dtype")} == {"d_in": 5, "d_sae": 12, "dtype": "float64"}
    assert config.get("d_out") == target_width
    # By the formulas of SAELens' classes, from the file alone
    own = load_file(tmp_path / "sae/sae_weights.safetensors")
    shift = own["b_dec"] if config["apply_b_dec_to_input"] else 0
    pre = (x - shift) @ own["W_enc"] + own["b_enc"]
    if "threshold" in own:
        latents = pre.relu() * (pre > own["threshold"])
    elif "k" in config:
        values, indices = pre.topk(config["k"])
        latents = torch.zeros_like(pre).scatter(-1, indices, values.relu())
    else:
        latents = pre.relu()
    expected = latents @ own["W_dec"] + own["b_dec"]
    torch.testing.assert_close(coder(x), expected)
    again = load(tmp_path / "sae")
    torch.testing.assert_close(again(x), expected)
    torch.testing.assert_close(again.encode(x), coder.encode(x) / coder.scale_out)
    torch.testing.assert_close(own["W_dec"].norm(dim=1), torch.ones(12).double())
    assert (latents > 0).any()


class Absolute(Activation):
    """Your own: SAELens knows no class that encodes like it."""

    def forward(self, pre):
        indices = pre.abs().topk(2).indices
        return torch.zeros_like(pre).scatter(-1, indices, pre.gather(-1, indices))


def test_an_activation_of_ones_own_is_not_saved_as_another(tmp_path):
    coder = SparseCoder(Absolute(), 5, 12)
    coder.draw(torch.Generator().manual_seed(0))
    assert (coder.encode(torch.ones(1, 5)) < 0).any()
    save(coder, tmp_path, {})
    with pytest.raises(ForgeError, match=naming("'Absolute'")):
        load(tmp_path)


def test_what_would_be_read_wrong_is_refused(tmp_path):
    save(coder_of(TopK(k=2)), tmp_path, {})
    config = json.loads((tmp_path / "cfg.json").read_text())
    for key, value, facts in (
        ("architecture", "gated", ["'gated'", "jumprelu"]),
        ("normalize_activations", "layer_norm", ["normalize_activations = 'layer_norm'", "'none'"]),
        ("rescale_acts_by_decoder_norm", True, ["rescale_acts_by_decoder_norm = True"]),
    ):
        (tmp_path / "cfg.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ForgeError, match=naming(*facts)):
            load(tmp_path)
    weights = load_file(tmp_path / "sae_weights.safetensors")
    save_file({**weights, "W_skip": torch.zeros(5, 5)}, tmp_path / "sae_weights.safetensors")
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    with pytest.raises(ForgeError, match="W_skip"):
        load(tmp_path)
    with pytest.raises(ForgeError, match=naming(f"{tmp_path}/elsewhere")):
        load(tmp_path / "elsewhere")
