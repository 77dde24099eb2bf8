"""`qwen_vit`, `merger`, `mrope` and DeepStack compute what `transformers` does with the weights of Qwen's models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from forge_core.engine.build import build_bare_model, build_context
from forge_core.parallel.initialise import materialise
from forge_core.plugins.catalog import Catalog
from forge_plugin_transformer import GroupedQueryAttention, RMSNorm, SwiGLU, Transformer
from forge_plugin_vision import (
    GRIDS,
    IMAGE,
    PATCHES,
    SECONDS,
    Joint,
    Merger,
    MultimodalRope,
    QwenViT,
    VisionLanguage,
    VisionPart,
)
from forge_plugin_vision.qwen_names import Family, from_huggingface, to_huggingface
from forge_testing import tiny_job

IMAGE_TOKEN, VIDEO_TOKEN, START, END = 60, 61, 62, 63
GRIDS_OF_ROWS = [[(1, 6, 4), (1, 2, 10)], [(1, 8, 6)], []]
"""Images of three rows, in patches; windows are 4 x 4."""
P, N, S = 48, 3, 26
PIXELS = torch.Generator().manual_seed(3)

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.2,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.2,
}
IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def reference(family: Family) -> Any:
    """A small model of `transformers` with random norms and biases."""
    torch.manual_seed(0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    if family == "qwen2_5_vl":
        tower = {**TOWER, "depth": 3, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 4}
        config = transformers.Qwen2_5_VLConfig(
            vision_config=tower, text_config={**TEXT, "rope_parameters": rope}, **IDS
        )
        model: Any = transformers.Qwen2_5_VLForConditionalGeneration(config)
    else:
        tower = {**TOWER, "depth": 4, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
        text = {**TEXT, "head_dim": 8, "rope_parameters": {**rope, "mrope_interleaved": True}}
        config = transformers.Qwen3VLConfig(vision_config=tower, text_config=text, **IDS)
        model = transformers.Qwen3VLForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model.eval()


def component(family: Family) -> VisionLanguage:
    """The same model."""
    qwen3 = family == "qwen3_vl"
    axis: dict[str, Any] = {"time": "apart"} if qwen3 else {"time": "seconds", "positions_per_second": 4.0}
    rope = MultimodalRope(sections=(2, 1, 1), interleaved=qwen3, **axis)
    attention = GroupedQueryAttention(heads=4, kv_heads=2, rope=rope, qk_norm=qwen3, bias=not qwen3, output_bias=False)
    language = Transformer(
        vocab_size=64, dim=32, layers=3, attention=attention, ffn=SwiGLU(hidden=48), norm=RMSNorm(eps=1e-6)
    )
    sizes: dict[str, Any] = {"dim": 32, "heads": 4, "hidden": 48, "patch": 4}
    encoder = QwenViT(layers=3, window=16, full_attention=(1,), **sizes)
    if qwen3:
        encoder = QwenViT(layers=4, norm="layernorm", ffn="gelu", patch_bias=True, table=5, **sizes)
    adapter = Merger(norm="layernorm" if qwen3 else "rmsnorm")
    taps = Joint(deepstack=(0, 2), deepstack_adapter=Merger(norm="layernorm", norm_over="block")) if qwen3 else Joint()
    vision = VisionPart(encoder=encoder, adapter=adapter, images_per_sequence=N, patches_per_sequence=P)
    return VisionLanguage(language=language, vision=vision, fusion=taps)


def built(family: Family, precision: str, folder: Any) -> Any:
    catalog = Catalog.installed()
    job = tiny_job(str(folder), catalog, model=component(family), precision=precision, seq_len=S)
    model, _ = build_bare_model(job, build_context(job, catalog, None))
    materialise(model, torch.device("cpu"), 0)
    return model


def with_weights_of(theirs: Any, model: Any) -> Any:
    state = from_huggingface(theirs.state_dict())
    model.load_state_dict(state)
    return model


def ids_of(grids: list[tuple[int, int, int]]) -> Tensor:
    """A row of S tokens: each image between its marks, with text before, between and after."""
    generator = torch.Generator().manual_seed(len(grids))
    parts = [torch.randint(50, (3,), generator=generator)]
    for frames, rows, columns in grids:
        marked = [START, *([IMAGE_TOKEN] * (frames * rows * columns // 4)), END]
        parts += [torch.tensor(marked), torch.randint(50, (2,), generator=generator)]
    row = torch.cat(parts)
    return torch.cat([row, torch.randint(50, (S - len(row),), generator=generator)])


def patches_of(grids: list[tuple[int, int, int]]) -> Tensor:
    """Bytes of the patches of each image, row by row."""
    return torch.randint(256, (sum(int(np.prod(grid)) for grid in grids), 96), generator=PIXELS, dtype=torch.uint8)


def in_blocks(patches: Tensor, grids: list[tuple[int, int, int]]) -> Tensor:
    """The same in the order of Qwen's processor: blocks of 2 x 2 patches row by row."""
    parts, start = [], 0
    for frames, rows, columns in grids:
        image = patches[start : start + frames * rows * columns]
        start += len(image)
        blocks = image.view(frames, rows // 2, 2, columns // 2, 2, -1).transpose(2, 3)
        parts.append(blocks.reshape(len(image), -1))
    return torch.cat(parts) if parts else patches


def batch_of(rows: list[list[tuple[int, int, int]]]) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the batch of Forge, and patches of all images in the order of Qwen's processor."""
    ids = torch.stack([ids_of(grids) for grids in rows])
    patches, grids = torch.zeros(len(rows), P, 96, dtype=torch.uint8), torch.zeros(len(rows), N, 3, dtype=torch.int64)
    theirs = []
    for row, own in enumerate(rows):
        values = patches_of(own)
        patches[row, : len(values)] = values
        grids[row, : len(own)] = torch.tensor(own, dtype=torch.int64).view(-1, 3)
        theirs.append(in_blocks(values, own))
    entries = {PATCHES: patches, GRIDS: grids, SECONDS: torch.zeros(len(rows), N)}
    return {"input_ids": ids.where(ids != IMAGE_TOKEN, IMAGE), **entries}, torch.cat(theirs)


def normalised(patches: Tensor, model: Any, dtype: torch.dtype) -> Tensor:
    form = model.vision.image_input.format
    mean, std = (torch.tensor(each, dtype=dtype).repeat_interleave(32) for each in (form.mean, form.std))
    return (patches.to(dtype) / 255 - mean) / std


def their_logits(theirs: Any, batch: dict[str, Tensor], pixels: Tensor) -> Tensor:
    ids = batch["input_ids"].where(batch["input_ids"] >= 0, IMAGE_TOKEN)
    grids = batch[GRIDS].flatten(0, 1)
    entries = {"image_grid_thw": grids[grids.prod(-1) > 0], "mm_token_type_ids": (ids == IMAGE_TOKEN).int()}
    with torch.no_grad():
        return theirs(input_ids=ids, pixel_values=pixels, **entries).logits


def our_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model.head.logits(model(batch))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_logits_are_those_of_transformers(family: Family, tmp_path: Any) -> None:
    theirs = reference(family)
    model = with_weights_of(theirs, built(family, "fp32", tmp_path))
    batch, pixels = batch_of(GRIDS_OF_ROWS)
    expected = their_logits(theirs, batch, normalised(pixels, model, torch.float32))
    assert expected.std() > 0.1
    assert (our_logits(model, batch) - expected).abs().max() < 1e-4


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """`transformers` computes angles and norms in float32 whatever the dtype of its weights; here in float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_logits_are_those_of_transformers_in_float64(family: Family, tmp_path: Any) -> None:
    theirs = reference(family).double()
    model = with_weights_of(theirs, built(family, "fp64", tmp_path))
    batch, pixels = batch_of(GRIDS_OF_ROWS)
    expected = their_logits(theirs, batch, normalised(pixels, model, torch.float64))
    assert (our_logits(model, batch) - expected).abs().max() < 1e-9


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_names_map_both_ways(family: Family, tmp_path: Any) -> None:
    theirs, model = reference(family).state_dict(), built(family, "fp32", tmp_path)
    own = dict(model.named_parameters())
    assert {name: tensor.shape for name, tensor in from_huggingface(theirs).items()} == {
        name: parameter.shape for name, parameter in own.items()
    }
    back = to_huggingface(from_huggingface(theirs), family, model.vision.image_input.format)
    assert list(back) == list(theirs)
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.items())


def test_names_of_published_files_are_read_and_others_refused() -> None:
    published = {"visual.merger.ln_q.weight": torch.zeros(2), "model.layers.3.mlp.up_proj.weight": torch.zeros(2)}
    assert list(from_huggingface(published)) == ["vision.adapter.norm.weight", "layers.3.ffn.up.weight"]
    for name in ("model.visual.blocks.0.attn.gate.weight", "model.visual.merger.mlp.1.weight", "lm_head.gain"):
        with pytest.raises(KeyError, match="no counterpart"):
            from_huggingface({name: torch.zeros(2)})
