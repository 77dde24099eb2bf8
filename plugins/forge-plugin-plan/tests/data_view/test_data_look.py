"""`forge-run data picture`: the picture shows what is in the row, to the pixel, and says what is wrong with it."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from forge_core import Trainer, load_job
from forge_core.cli import main
from forge_core.plugins.catalog import Catalog
from forge_kit.data.job_data import open_data
from forge_plugin_plan.data_view.decoding import Decoder
from forge_plugin_plan.data_view.look_pictures import cut_picture
from forge_plugin_plan.data_view.sheet import Sheet
from forge_testing.refusals import lacks

pytest.importorskip("forge_plugin_vision")
pytest.importorskip("forge_plugin_transformer")

SEEN = '''
import numpy as np
from attrs import frozen
from forge_core.contracts.components import DatasetComponent

SIDE = 4
IMAGE = np.random.default_rng(0).integers(0, 256, (16, 24, 3), np.uint8)
CLIP = np.random.default_rng(1).integers(0, 256, (4, 8, 16, 3), np.uint8)
A, B, END = 1, 2, 31


def cut(frames):
    """Patches of frames, two at a time: channel, frame, row, column."""
    patches = []
    for time in range(0, len(frames), 2):
        for top in range(0, frames.shape[1], SIDE):
            for left in range(0, frames.shape[2], SIDE):
                block = frames[time : time + 2, top : top + SIDE, left : left + SIDE]
                patches.append(block.transpose(3, 0, 1, 2).ravel())
    return patches


@frozen(kw_only=True)
class Seen(DatasetComponent):
    """An image of 4 x 6 patches and a word; then a clip of two entries of 2 x 4 patches, with a letter before each."""

    fault: str = ""

    def build(self, context):
        return Rows(self.fault)


class Rows:
    held_out = bytes_per_token = None

    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if self.fault == "broken":
            raise OSError("a.mp4 ends too early")
        first, second = [-1] * (5 if self.fault == "short" else 6), [-2] * 2
        ids = np.array([*first, A, B, A, *second, B, *second, A, B, *[END] * 7][:20])
        learned = {6: A, 7: B, 14: A} if self.fault != "short" else {}
        labels = np.full(20, -100)
        for position, token in learned.items():
            labels[position - 1] = token
        patches = np.zeros((48, 96), np.uint8)
        own = cut(np.stack([IMAGE, IMAGE])) + cut(CLIP)
        patches[: len(own)] = own
        grids = np.array([[1, 4, 6], [2, 2, 4], [0, 0, 0]])
        documents = np.array([0] * 8 + [1] * 8 + [2] * 4)
        return {"input_ids": ids, "labels": labels, "grids": grids, "patches": patches, "document_ids": documents,
                "grid_seconds": np.array([0, 1.5, 0], np.float32),
                "positions": np.concatenate([np.arange(8), np.arange(8), np.arange(4)])}
'''

MODEL = """
[model]
type = "vision_language"
[model.language]
vocab_size = 32
dim = 16
layers = 1
[model.language.attention]
heads = 2
head_dim = 8
[model.language.attention.rope]
type = "mrope"
sections = [2, 1, 1]
[model.vision]
images_per_sequence = 3
patches_per_sequence = 48
[model.vision.encoder]
type = "qwen_vit"
dim = 16
layers = 1
heads = 2
patch = 4
window = 0
[model.vision.adapter]
type = "merger"
"""
PACKED = '[data.packing]\ntype = "forge-run/concatenate"\n'


@pytest.fixture
def seeing(here: Path, write_job: Callable[..., str]) -> Callable[..., str]:
    """Write a job of the dataset `Seen`, with further keys of it; returns its name."""

    def write(more: str = "") -> str:
        job = here / write_job("Seen", seq_len=20)
        job.write_text(job.read_text().replace('[model]\ntype = "forge_testing:TinyModel"\n', MODEL))
        job.write_text(job.read_text().replace('py:Seen"\n', f'py:Seen"\n{more}\n'))
        parts = here / "parts.py"
        parts.write_text(parts.read_text() + SEEN)
        return job.name

    return write


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run `forge-run data picture …` in this process: exit code, and all that it prints."""

    def run(*argv: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["data", "picture", *argv])
        return code, "".join(capsys.readouterr())

    return run


def sheet_of(job: str, number: int = 0) -> Sheet:
    catalog = Catalog.installed()
    return Sheet.of(open_data(load_job(job, catalog=catalog), catalog), number, 0)


def source_of(here: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(SEEN, names)
    return names


def test_images_and_clips_are_put_together_to_the_pixel(here, seeing) -> None:
    image, clip = sheet_of(seeing()).visuals
    source = source_of(here)
    assert (image.pixels[0] == source["IMAGE"]).all()
    assert (clip.pixels.reshape(4, 8, 16, 3) == source["CLIP"]).all()
    assert (image.is_clip, clip.is_clip, clip.seconds) == (False, True, 1.5)
    assert image.positions.tolist() == [*range(6)]
    assert [clip.positions_of(entry).tolist() for entry in (0, 1)] == [[9, 10], [12, 13]]


def test_a_picture_has_every_pixel_between_the_cuts(here, seeing) -> None:
    image = sheet_of(seeing()).visuals[0]
    side = 32  # of a patch in the picture: eight times its own
    cut = np.asarray(cut_picture(image.pixels[0, 0], image))[:, -(6 * side + 4 * 2 + 3) :]
    # Cuts of 2 pixels around each position's 2 x 2 patches, and of 1 within.
    starts = [2, 2 + side + 1, 4 + 2 * side + 1, 4 + 3 * side + 2, 6 + 4 * side + 2, 6 + 5 * side + 3]
    for row, top in enumerate(starts[:4]):
        for column, left in enumerate(starts):
            shown = cut[top : top + side : 8, left : left + side : 8]
            assert (shown == source_of(here)["IMAGE"][row * 4 : row * 4 + 4, column * 4 : column * 4 + 4]).all()
    assert tuple(cut[0, 0]) == (0xB3, 0x59, 0x00)
    assert tuple(cut[10, starts[0] + side]) != (0xB3, 0x59, 0x00)  # within a position: pale


def test_the_page_has_pictures_times_tokens_documents_and_positions(seeing, look) -> None:
    assert look(seeing(), "--out", "look.html")[0] == 0
    page = Path("look.html").read_text("utf-8")
    pictures = [base64.b64decode(data) for data in re.findall(r'src="data:image/png;base64,([^"]+)"', page)]
    assert len(pictures) == 3  # an image and two entries of a clip
    widths = [Image.open(io.BytesIO(picture)).width for picture in pictures]
    assert widths[1] == widths[2] > 2 * 4 * 22  # both frames of an entry, side by side
    text = html.unescape(re.sub(r"<[^>]+>", "|", page))
    for words in (
        "image 1: 6 positions",
        "clip 2, 0.00 s: 2 positions",
        "clip 2, 1.50 s: 2 positions",
        "clip 2: 1.50 s",
    ):
        assert words in text
    assert [int(number) for number in re.findall(r"\|document (\d)", text)] == [1, 2]
    learned = "".join(re.findall(r'background: #dafbe1"[^>]*>([^<]+)', page)).removeprefix("learned")
    assert learned == "ABA"
    # Qwen's coordinates: an image of 2 x 3 features starts at 0, and the text behind it at 3.
    assert "t h w 0 0 0 to 0 1 2" in text
    assert re.search(r'title="position 6, position id 6, t h w 3, learned">A<', page)


def test_a_png_is_written_and_no_weights_are_made(here, seeing, look) -> None:
    job = seeing()
    (here / job).write_text((here / job).read_text().replace("dim = 16\nlayers = 1", "dim = 32768\nlayers = 50"))
    code, out = look(job, "--step=2", "--sample=1")  # 10^11 weights
    assert (code, out) == (0, "run: sample 5 (row 1 of step 2), source '0'\nlook.png\n")
    assert Image.open("look.png").width == 1280
    assert not (here / "runs").exists()


@pytest.mark.parametrize(("source", "seq_len"), [("Chats", 8), ("Talk", 6)])
def test_sample_n_is_the_nth_sequence_that_training_reads(source, seq_len, write_job, batches) -> None:
    job = write_job(source, PACKED, seq_len=seq_len)
    Trainer(load_job(job), hooks=[batches], echo=lambda text: None).run()
    rows = [row for step in batches.steps for row in step]
    for number in (0, 6, 23):
        pieces = sheet_of(job, number).pieces
        inputs = [piece for piece in pieces if piece.position >= 0]
        text = "".join(piece.text for piece in inputs)
        assert text == "".join(part for part, _, _ in Decoder(_letters(job)).parts(rows[number][0]))
        assert sum(piece.style == "learned" for piece in pieces) == sum(label >= 0 for label in rows[number][1])


def _letters(job: str) -> Any:
    catalog = Catalog.installed()
    return open_data(load_job(job, catalog=catalog), catalog).tokenizer


def test_what_is_wrong_with_a_row_is_said(seeing, look) -> None:
    out = look(seeing('fault = "short"'))[1]
    assert not lacks(out, "input_ids", 9, 10)
    facts = json.loads(look(seeing('fault = "short"'), "--json")[1])
    title, path, *faults = out.splitlines()
    assert (facts["title"], facts["out"], [f"! {fault}" for fault in facts["faults"]]) == (title, path, faults)
    assert (facts["step"], facts["sample"]) == (1, 0)


def test_an_unreadable_source_a_number_out_of_range_and_an_unknown_format_are_named(seeing, look) -> None:
    job = seeing('fault = "broken"')
    code, out = look(job, "--sample=3")
    assert code == 1
    assert not lacks(out, "source '0'", "OSError: a.mp4 ends too early")
    code, out = look(job, "--out=there/look.gif")
    assert code == 2
    assert not lacks(out, "--out there/look.gif", "'.gif'", ".png", ".html")
    code, out = look(job, "--step=7", "--sample=4")
    assert code == 2
    assert not lacks(out, "--step 7", "train.steps is 6", "1 to 6")
    assert not lacks(out, "--sample 4", "step 7 has 4 samples", "0 to 3")


class Bytes:
    vocab_size, end_of_text = 257, 256

    def decode(self, ids):
        return bytes(id_ for id_ in ids if id_ < 256).decode("utf-8", "replace")

    def save(self, folder):
        pass


def test_characters_of_several_tokens_stay_together() -> None:
    ids = [*"für 画像 ✓".encode(), 256, 0xFF]
    parts = [*Decoder(Bytes()).parts(ids)]  # type: ignore[arg-type]
    assert [text for text, _, _ in parts] == [*"für 画像 ✓", "<end of text>", "\ufffd"]
    assert [count for _, _, count in parts] == [1, 2, 1, 1, 3, 3, 1, 3, 1, 1]
