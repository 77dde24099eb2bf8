"""Evaluation `looking` of clips: what the order of their frames is worth."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
import torch
from attrs import frozen
from torch.nn import functional as F

from forge_core.contracts.components import DatasetComponent, ModelComponent
from forge_core.engine.evaluation import evaluate
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_vision import GRIDS, IMAGE, PATCHES, VIDEO, Grid, ImageFormat, VisionLanguage, image_input
from forge_plugin_vlm_eval import Looking
from forge_plugin_vlm_eval.frame_order import reordered, shuffled, still
from forge_testing.layouts import LAYOUTS
from forge_testing.processes import run_on_ranks
from forge_testing.runs import tiny_run
from forge_testing.tiny_model import TinyNetwork
from forge_testing.vision import tiny_vision

ENTRIES, ROWS, LENGTH, CERTAIN = 4, 7, 24, 3.0
VISION = attrs.evolve(tiny_vision(), images_per_sequence=ENTRIES)
VLM = VisionLanguage(
    language=Transformer(
        vocab_size=32, dim=16, layers=2, attention=GroupedQueryAttention(heads=4, kv_heads=2), init_std=0.5
    ),
    vision=VISION,
)


@frozen(kw_only=True)
class Clips(DatasetComponent):
    """Held-out clips whose frames are black (0) or white (1); what follows is the colour of the last one.

    Row 3 has an image in the place of its clip, and row 5 neither.
    """

    def build(self, context):
        form = image_input(context.job).format
        return ClipRows([], ClipRows([self.row(number, form) for number in range(ROWS)]))

    def row(self, number, form):
        colours = self.colours(number, form)
        kinds = {3: (1, IMAGE), 5: (0, 0)}
        entries, id_ = kinds.get(number, (ENTRIES, VIDEO))
        patches = np.zeros((ENTRIES * 4, form.values), np.uint8)
        shown = colours.reshape(ENTRIES, 1, 1, form.frames, 1) * np.ones((1, 4, 3, 1, form.patch**2), np.int64)
        patches[: entries * 4] = 255 * shown.reshape(ENTRIES * 4, -1)[: entries * 4]
        ids = np.full(LENGTH, 2)
        ids[1 : 1 + entries * 4] = id_
        labels = np.full(LENGTH, -100)
        labels[-2:] = colours[-1]
        grids = np.zeros((ENTRIES, 3), np.int64)
        grids[0] = (entries, 2, 2) if entries else (0, 0, 0)
        return {"input_ids": ids, "labels": labels, PATCHES: patches, GRIDS: grids}

    def colours(self, number, form):
        return np.random.default_rng(number).integers(0, 2, ENTRIES * form.frames)


@frozen
class ClipRows:
    rows: list
    held_out: object = None
    bytes_per_token: None = None

    def __len__(self):
        return max(len(self.rows), 1)

    def __getitem__(self, index):
        return self.rows[index]


class Sure(TinyNetwork):
    """Gives `CERTAIN` to the token that `pick` reads off the colours (B, frames) of the row's first clip."""

    def embed(self, batch):
        form = self.form
        every = batch[PATCHES].view(-1, ENTRIES, 4, 3, form.frames, form.patch**2)[:, :, 0, 0, :, 0]
        token = self.pick(every.flatten(1).long() // 255)
        logits = CERTAIN * F.one_hot(token, 32).double()
        return (logits[:, None].expand(-1, LENGTH, -1),)

    def finish(self, carry, batch):
        return carry[0]


PICKS = {
    "last frame": lambda colours: colours[:, -1],
    "most frames": lambda colours: (2 * colours.sum(1) > colours.shape[1]).long(),
}


@frozen(kw_only=True)
class SureModel(ModelComponent):
    pick: str
    frames: int

    def image_input(self):
        seen = VLM.image_input()
        return attrs.evolve(seen, format=attrs.evolve(seen.format, frames=self.frames))

    def batch_fields(self, job):
        form = self.image_input().format
        fields = VLM.batch_fields(job)
        return {**fields, PATCHES: attrs.evolve(fields[PATCHES], shape=(ENTRIES * 4, form.values))}

    def build(self, context):
        network = Sure(32, 0, 0.0, 32, context.dtype)
        network.form, network.pick = self.image_input().format, PICKS[self.pick]
        return network


def measured(make_job, build, model, **keys):
    data = {"sources": (Clips(),)}
    job = make_job(model=model, data=data, evaluations={"looking": Looking(**keys)}, seq_len=LENGTH, precision="fp64")
    run = build(job)
    if isinstance(model, SureModel):
        run.model.head.weight.data = torch.eye(32, dtype=torch.float64)
    return evaluate(run, 0)


@pytest.mark.parametrize("frames", [1, 2])
@pytest.mark.parametrize("pick", PICKS)
def test_a_model_that_reads_the_last_frame_uses_time_and_one_that_counts_frames_does_not(make_job, build, pick, frames):
    metrics = measured(make_job, build, model := SureModel(pick=pick, frames=frames))
    form, answer = model.image_input().format, PICKS[pick]
    clips = [number for number in range(ROWS) if number not in (3, 5)]

    def loss(order):
        """In closed form: a certainty of `CERTAIN` among 32 tokens, right or wrong."""
        total = 0.0
        for number in clips:
            colours = Clips().colours(number, form)
            said = int(answer(torch.from_numpy(colours[order(number)])[None]))
            total += math.log(math.exp(CERTAIN) + 31) - CERTAIN * (said == colours[-1])
        return total / len(clips)

    every = ENTRIES * frames
    own = loss(lambda number: np.arange(every))
    expected = {
        "clip_loss": own,
        "shuffled_loss": loss(lambda number: shuffled(number)(0, every)),
        "still_loss": loss(lambda number: np.zeros(every, int)),
    }
    assert {name: metrics[f"looking/{name}"] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert metrics["looking/time_bits"] == pytest.approx((expected["shuffled_loss"] - own) / math.log(2), abs=1e-12)
    assert metrics["looking/motion_bits"] == pytest.approx((expected["still_loss"] - own) / math.log(2), abs=1e-12)
    if pick == "last frame":
        assert metrics["looking/time_bits"] > 0.5
    else:
        assert metrics["looking/time_bits"] == pytest.approx(0, abs=1e-12)
        assert metrics["looking/motion_bits"] != 0


def test_frames_change_places_as_a_whole_and_images_and_filling_stay():
    form = ImageFormat(patch=1, channels=2, frames=2)
    frames = np.arange(12).reshape(2, 2, 3)  # entry, its frame, patch
    clip = np.stack([frames, frames + 100], 2).transpose(0, 3, 2, 1).reshape(6, 4)  # channels 0 and 100
    row = {
        PATCHES: np.concatenate([np.full((3, 4), 50), clip, np.full((1, 4), 7)]).astype(np.uint8),
        GRIDS: np.array([[1, 1, 3], [2, 3, 1], [0, 0, 0]]),
        "labels": np.array([1]),
    }
    turned = reordered(row, form, lambda clip, count: np.arange(count)[::-1])
    first = [[9, 6, 109, 106], [10, 7, 110, 107], [11, 8, 111, 108]]
    last = [[3, 0, 103, 100], [4, 1, 104, 101], [5, 2, 105, 102]]
    assert turned[PATCHES].tolist() == [[50] * 4] * 3 + first + last + [[7] * 4]
    assert turned["labels"] is row["labels"]
    frozen_row = reordered(row, form, still)[PATCHES][3:9].tolist()
    assert frozen_row == [[0, 0, 100, 100], [1, 1, 101, 101], [2, 2, 102, 102]] * 2
    assert (row[PATCHES][3:9] == clip).all()


def test_a_clip_after_joined_tiles_is_found():
    form = ImageFormat(patch=1, channels=1, frames=1)
    tiles = Grid.of_tiles(1, 2, (4, 8))
    clip = np.array([[0], [1], [2], [3]])
    patches = np.concatenate([np.full((tiles.patches, 1), 50), clip]).astype(np.uint8)
    row = {PATCHES: patches, GRIDS: np.array([tiles, (2, 1, 2)])}
    turned = reordered(row, form, lambda clip, count: np.arange(count)[::-1])
    assert turned[PATCHES][:, 0].tolist() == [50] * 48 + [2, 3, 0, 1]


def test_an_order_is_a_function_of_row_and_clip_and_never_the_true_one():
    orders = {(row, clip): tuple(shuffled(row)(clip, 3)) for row in range(20) for clip in range(2)}
    assert orders == {(row, clip): tuple(shuffled(row)(clip, 3)) for row in range(20) for clip in range(2)}
    assert set(orders.values()) == {(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)}


def test_every_layout_measures_what_one_process_does(catalog, tmp_path):
    changes = {"model": VLM, "data": {"sources": (Clips(),)}, "evaluations": {"looking": Looking()}}
    changes |= {"seq_len": LENGTH, "global_batch_size": 8, "precision": "fp64"}
    expected = evaluate(tiny_run(tmp_path, **changes), 0)
    cases = {name: LAYOUTS[name] for name in ("fsdp2", "tp2", "pp2", "cp2")}

    def evaluated(rank):
        return {
            name: evaluate(
                tiny_run(tmp_path, **changes, micro_batch_size=case.micro_batch_size, parallel=case.stages(catalog)),
                0,
            )
            for name, case in cases.items()
        }

    for metrics in run_on_ranks(2, evaluated):
        assert metrics == {name: pytest.approx(expected, rel=1e-9) for name in cases}
    assert abs(expected["looking/time_bits"]) > 1e-3
