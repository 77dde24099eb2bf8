"""Tiny Qwen2.5-VL, Qwen3-VL and Qwen3.5, and prompts of them with images and videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from published_models import EXPERTS, QWEN3_5, SIZES, stack_experts
from published_vision import Seeing
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge_plugin_vision import GRIDS, IMAGE, PATCHES, SECONDS, VIDEO

IMAGE_TOKEN, VIDEO_TOKEN, START, END = 60, 61, 62, 63
IDS: Mapping[str, int] = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
PATCH, FRAMES = 4, 2
TEXT: Mapping[str, Any] = {**SIZES, "vocab_size": 64, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2}
TOWER: Mapping[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 3,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": FRAMES,
    "out_hidden_size": SIZES["hidden_size"],
}


def rope(**keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0, "mrope_section": [2, 1, 1], **keys}}


def qwen2_5_vl(**keys: Any) -> Any:
    """With windows of 4 x 4 patches in all blocks but one."""
    tower = {**TOWER, "depth": 3, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 3}
    return transformers.Qwen2_5_VLConfig(vision_config=tower, text_config={**TEXT, **rope()}, **IDS, **keys)


def qwen3_vl(**keys: Any) -> Any:
    """With features of two blocks added after the first language layers."""
    tower = {**TOWER, "depth": 4, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    text = {**TEXT, "head_dim": 8, **rope(mrope_interleaved=True)}
    return transformers.Qwen3VLConfig(vision_config=tower, text_config=text, **IDS, **keys)


class AsPublished(Seeing):
    """Its experts are transposed in published files, as `transformers` reads them and does not write them."""

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        model = super().write(folder, dtype)
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            turned = {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}
            save_file(turned, path, {"format": "pt"})
        return model


def qwen3_vl_moe(**keys: Any) -> Any:
    """With experts in every other layer."""
    tower = {**TOWER, "depth": 4, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    text = {
        **TEXT,
        **EXPERTS,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "decoder_sparse_step": 2,
        **rope(mrope_interleaved=True),
    }
    return transformers.Qwen3VLMoeConfig(vision_config=tower, text_config=text, **IDS, **keys)


HYBRID: Mapping[str, Any] = {
    **{key: value for key, value in QWEN3_5.items() if key != "rope_parameters"},
    **rope(mrope_interleaved=True, partial_rotary_factor=0.5),
}
SIMPLE_TOWER: Mapping[str, Any] = {**TOWER, "depth": 2, "num_position_embeddings": 25}


def qwen3_5(**keys: Any) -> Any:
    """With Gated DeltaNet in two of three layers, and half of each head rotated in the third."""
    return transformers.Qwen3_5Config(vision_config=SIMPLE_TOWER, text_config={**TEXT, **HYBRID}, **IDS, **keys)


def qwen3_5_moe(**keys: Any) -> Any:
    """The same, with experts."""
    text = {**TEXT, **HYBRID, **EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48}
    del text["intermediate_size"]
    return transformers.Qwen3_5MoeConfig(vision_config=SIMPLE_TOWER, text_config=text, **IDS, **keys)


class Stacked(Seeing):
    """All experts of a layer are one tensor in published files, which `transformers` reads and does not write."""

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        model = super().write(folder, dtype)
        stack_experts(folder)
        return model


MODELS: Mapping[str, Seeing] = {
    "qwen2_5_vl": Seeing("Qwen2_5_VLForConditionalGeneration", qwen2_5_vl),
    "qwen2_5_vl, tied": Seeing("Qwen2_5_VLForConditionalGeneration", lambda: qwen2_5_vl(tie_word_embeddings=True)),
    "qwen3_vl": Seeing("Qwen3VLForConditionalGeneration", qwen3_vl),
    "qwen3_vl_moe": AsPublished("Qwen3VLMoeForConditionalGeneration", qwen3_vl_moe),
    "qwen3_5": Seeing("Qwen3_5ForConditionalGeneration", qwen3_5),
    "qwen3_5_moe": Stacked("Qwen3_5MoeForConditionalGeneration", qwen3_5_moe),
}


class Item(NamedTuple):
    """An image or a video of a prompt."""

    id: int
    grid: tuple[int, int, int]
    """In patches."""
    seconds: float = 0.0


ROWS: Sequence[Sequence[Item]] = [
    [
        Item(IMAGE, (1, 6, 4)),
        Item(VIDEO, (3, 4, 6), 0.7),
        Item(IMAGE, (1, 2, 10)),
        Item(VIDEO, (2, 2, 4), 1.6),
    ],
    [Item(VIDEO, (2, 8, 6), 0.25)],
]
"""Prompts with images and videos whose frames are not equally far apart; windows are 4 x 4 patches."""


class Prompts(NamedTuple):
    """The same prompts for both sides."""

    batch: dict[str, Tensor]
    inputs: Callable[..., dict[str, Tensor]]
    """inputs(vision, rows): what `transformers` takes for some rows, with pixels as our `vision` normalises them."""


def prompts_of(family: str) -> Prompts:
    """The prompts of `ROWS`: frames of a clip have text between them where the family has it so."""
    generator = torch.Generator().manual_seed(4)
    patches = [[_random(item, generator) for item in items] for items in ROWS]
    ids = [_ids(items, family != "qwen2_5_vl", generator) for items in ROWS]
    length = max(map(len, ids)) + 2
    images, room = max(map(len, ROWS)), max(sum(map(len, row)) for row in patches)
    batch = {
        "input_ids": torch.stack([torch.cat([row, torch.arange(3, 3 + length - len(row))]) for row in ids]),
        PATCHES: torch.zeros(len(ROWS), room, 3 * FRAMES * PATCH**2, dtype=torch.uint8),
        GRIDS: torch.zeros(len(ROWS), images, 3, dtype=torch.int64),
        SECONDS: torch.zeros(len(ROWS), images),
    }
    for row, items in enumerate(ROWS):
        batch[PATCHES][row, : sum(map(len, patches[row]))] = torch.cat(patches[row])
        for number, item in enumerate(items):
            batch[GRIDS][row, number], batch[SECONDS][row, number] = torch.tensor(item.grid), item.seconds

    def inputs(vision: Any, rows: slice = slice(None)) -> dict[str, Tensor]:
        own = batch["input_ids"][rows]
        tokens = own.where(own != IMAGE, IMAGE_TOKEN).where(own != VIDEO, VIDEO_TOKEN)
        entries = {"input_ids": tokens, "mm_token_type_ids": (own == IMAGE).int() + 2 * (own == VIDEO).int()}
        kinds = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}
        every = [
            pair for items, cut in zip(ROWS[rows], patches[rows], strict=True) for pair in zip(items, cut, strict=True)
        ]
        for id_, (pixels, grids) in kinds.items():
            if chosen := [(item, cut) for item, cut in every if item.id == id_]:
                entries[pixels] = torch.cat([vision.normalise(in_blocks(cut, item.grid)) for item, cut in chosen])
                entries[grids] = torch.tensor([item.grid for item, _ in chosen])
        if family == "qwen2_5_vl":
            entries["second_per_grid_ts"] = torch.tensor([item.seconds for item, _ in every if item.id == VIDEO])
        return entries

    return Prompts(batch, inputs)


def _random(item: Item, generator: torch.Generator) -> Tensor:
    count = item.grid[0] * item.grid[1] * item.grid[2]
    return torch.randint(256, (count, 3 * FRAMES * PATCH**2), generator=generator, dtype=torch.uint8)


def _ids(items: Sequence[Item], apart: bool, generator: torch.Generator) -> Tensor:
    def text(count: int) -> list[int]:
        return torch.randint(3, 50, (count,), generator=generator).tolist()

    ids = text(3)
    for item in items:
        frame = [item.id] * (item.grid[1] * item.grid[2] // 4)
        if item.id == VIDEO and apart:
            for _ in range(item.grid[0]):
                ids += [*text(2), START, *frame, END]
        else:
            ids += [START, *frame * item.grid[0], END]
        ids += text(2)
    return torch.tensor(ids)


def in_blocks(patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """Patches in the order of Qwen's processor: blocks of 2 x 2, row by row."""
    frames, rows, columns = grid
    return patches.view(frames, rows // 2, 2, columns // 2, 2, -1).transpose(2, 3).reshape(len(patches), -1)
