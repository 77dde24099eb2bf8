"""A job with a store: what a user finds in the folder of the run."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from forge_core.engine.trainer import Trainer
from forge_plugin_taps import Store, Taps
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_testing import Numbers, tiny_job


def test_a_store_holds_the_sampled_steps_of_the_points(tmp_path, catalog):
    attention = GroupedQueryAttention(heads=4, kv_heads=2)
    taps = Taps(
        interval=2, positions=3, points=("layers.*.q",), gradients=("layers.1.resid_post",), sinks={"store": Store()}
    )
    job = tiny_job(
        str(tmp_path),
        catalog,
        model=Transformer(vocab_size=32, dim=16, layers=2, attention=attention),
        data={"sources": (Numbers(ignored=1, held_out=5),)},
        micro_batch_size=2,
        parallel={"taps": taps},
    )
    Trainer(job).run()
    (folder,) = tmp_path.rglob("taps")
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4"]
    step = folder / "step-4"
    names = ["layers.0.q", "layers.1.q", "layers.1.resid_post.grad"]
    assert sorted(path.stem for path in step.iterdir()) == [*names, "taps", "tokens"]
    assert load_file(step / "layers.0.q.safetensors")["layers.0.q"].shape == (12, 4, 4)
    tokens = load_file(step / "tokens.safetensors")
    assert torch.equal(tokens["row"], torch.arange(4).repeat_interleave(3))
