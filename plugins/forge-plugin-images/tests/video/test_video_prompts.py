"""Prompts with videos, and `forge-run generate --video`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from forge_core import ForgeError, Trainer
from forge_core.cli import main
from forge_core.plugins.catalog import Catalog
from forge_plugin_images import ImageChat
from forge_plugin_images.prompts import prompts_with_images
from forge_plugin_images.video import Frames, MovingShapes, Uniform, VideoText
from forge_plugin_text import Bytes
from forge_plugin_transformer import GroupedQueryAttention, Transformer
from forge_plugin_vision import Merger, MultimodalRope, QwenViT, VisionLanguage, VisionPart
from forge_testing.refusals import naming, problems_of
from forge_testing.vision import RandomImages

TIMES = "[{seconds:.0f}]"


def model(time: Any, **keys: Any) -> VisionLanguage:
    """A tower that joins two frames in a patch, and positions of frames as Qwen2.5-VL or Qwen3-VL has them."""
    rope = MultimodalRope(sections=(2, 1, 1), interleaved=True, time=time)
    attention = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=8, rope=rope)
    tower = QwenViT(dim=16, layers=1, heads=2, hidden=24, patch=4, **keys)
    return VisionLanguage(
        language=Transformer(vocab_size=257, dim=16, layers=2, attention=attention, init_std=0.3),
        vision=VisionPart(encoder=tower, adapter=Merger(), images_per_sequence=3, patches_per_sequence=300),
    )


def test_videos_are_refused_for_an_encoder_that_takes_none(make_job, clips):
    for source in (VideoText(path=str(clips / "*.mp4"), video=Frames()), MovingShapes()):
        job = make_job(source, model=model("apart", clips=False))
        assert "takes images, and no clips of videos" in str(problems_of(job))
    with pytest.raises(ForgeError, match=naming("takes images, and no clips of videos")):
        prompts_with_images(["<video>"], [], job, Bytes().build(None, list), videos=[str(clips / "a.mp4")])


@pytest.fixture
def image(tmp_path: Path) -> str:
    Image.new("RGB", (16, 8), (200, 10, 10)).save(tmp_path / "red.png")
    return str(tmp_path / "red.png")


def test_videos_stand_where_the_prompts_say(make_job, clips, image):
    """As the job's first source with videos shows them: here four frames in two patches, each after its time."""
    frames = Frames(sampling=Uniform(min_frames=4, max_frames=4), timestamps="text", timestamp_format=TIMES)
    job = make_job(ImageChat(path="none", video=frames), model=model("apart"))
    tokenizer = Bytes().build(None, list)
    clip = str(clips / "a.mp4")
    prompts = prompts_with_images(["a<image>b<video>", "c<video>d"], [image], job, tokenizer, videos=[clip, clip])
    entry = [-2] * 12
    shown = [*b"[1]", *entry, *b"[3]", *entry]
    assert prompts.ids == [[*b"a", -1, -1, *b"b", *shown], [*b"c", *shown, *b"d"]]
    assert prompts.entries["grids"].tolist() == [[[1, 2, 4], [2, 4, 12], [0] * 3], [[2, 4, 12], [0] * 3, [0] * 3]]
    assert prompts.entries["grid_seconds"].tolist() == [[0, 2.5, 0], [2.5, 0, 0]]
    alone = prompts_with_images(["x"], [image], job, tokenizer, videos=[clip])
    assert alone.ids == [[-1, -1, *shown, *b"x"]]
    assert torch.equal(alone.entries["patches"][0], prompts.entries["patches"][0])
    assert prompts_with_images(["<video>"], [image], job, tokenizer).ids == [[-1, -1, *b"<video>"]]


def test_what_cannot_be_shown_is_refused(make_job, clips, tmp_path, monkeypatch):
    job, tokenizer, clip = (
        make_job(RandomImages(), model=model("seconds")),
        Bytes().build(None, list),
        str(clips / "a.mp4"),
    )
    with pytest.raises(ForgeError, match=naming("<video> 1", "2 videos")):
        prompts_with_images(["<video>"], [], job, tokenizer, videos=[clip, clip])
    with pytest.raises(ForgeError, match=naming("4 images and videos", "384 patches", "3 images", "300 patches")):
        prompts_with_images(["x"], [], job, tokenizer, videos=[clip] * 4)
    (tmp_path / "broken.mp4").write_bytes(b"no clip")
    with pytest.raises(ForgeError, match=r"broken\.mp4"):
        prompts_with_images(["x"], [], job, tokenizer, videos=[str(tmp_path / "broken.mp4")])
    offers = Catalog.offers
    monkeypatch.setattr(Catalog, "offers", lambda self, kind: [] if kind == "video" else offers(self, kind))
    with pytest.raises(ForgeError, match=naming("pip install", "forge-plugin-images")):
        prompts_with_images(["x"], [], job, tokenizer, videos=[clip])


@pytest.mark.parametrize("time", ["seconds", "apart"])
def test_generate_takes_videos_and_continues_alike_without_a_cache(make_job, catalog, clips, image, capsys, time):
    job = make_job(RandomImages(), model=model(time), steps=1, seq_len=160)
    folder = str(Trainer(job, catalog=catalog).run().folder)
    prompt = ["--prompt", "<video>a<image>b", "--image", image, "--max-tokens", "6", "--temperature", "0"]
    capsys.readouterr()

    def said(*options: str) -> str:
        assert main(["generate", folder, *prompt, *options]) == 0
        return capsys.readouterr().out

    text = said("--video", str(clips / "a.mp4"))
    assert text.startswith("<video>a<image>b")
    assert said("--video", str(clips / "a.mp4"), "--no-cache") == text
    assert main(["generate", folder, "--video", "nowhere.mp4"]) != 0
    assert "nowhere.mp4" in capsys.readouterr().err
