"""Sounds become spectrograms, piece by piece, whose positions are those of a third modality."""

from __future__ import annotations

import io
import json
import struct
import wave
from pathlib import Path

import attrs
import numpy as np
import pytest

from forge_core.contracts.layout import Layout
from forge_plugin_cross_attention import CrossAttention
from forge_plugin_images import SoundText, SoundTextStream
from forge_plugin_images.decoding import BytesImage
from forge_plugin_images.sound_visuals import SoundVisual
from forge_plugin_images.spectrograms import BrokenSound, Spectrogram
from forge_plugin_vision import GRIDS, PATCHES, SOUND, Joint, LinearAdapter, TiledViT, VisionPart
from forge_testing.images import tiny_model
from forge_testing.refusals import at, check_problems, naming

BANDS = 32


def wav(samples: np.ndarray, rate: int = 16000, width: int = 2, channels: int = 1) -> BytesImage:
    """A WAV file of samples in [-1, 1], alike in all channels."""
    data = io.BytesIO()
    values = np.repeat(samples, channels)
    whole = np.round(values * (2 ** (8 * width - 1) - 1)).astype(np.int64) + (128 if width == 1 else 0)
    with wave.open(data, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(b"".join(int(value).to_bytes(width, "little", signed=width > 1) for value in whole))
    return BytesImage("a sound", data.getvalue())


def sine(hertz: float, seconds: float = 0.2, rate: int = 16000, loudness: float = 1.0) -> np.ndarray:
    return loudness * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def spectrogram(bands: int = BANDS) -> Spectrogram:
    return Spectrogram(bands, 0.01, 0.025, (0.0, 8000.0), (-80.0, 0.0))


def levels(file: BytesImage, spectra: int = 20, bands: int = BANDS) -> np.ndarray:
    return np.concatenate(list(spectrogram(bands).pieces(file, spectra)), 1)


def band_of(hertz: float) -> int:
    """The row from above of a frequency."""
    mel = 2595 * np.log10(1 + hertz / 700)
    return BANDS - 1 - (round(float(mel / (2595 * np.log10(1 + 8000 / 700)) * (BANDS + 1))) - 1)


@pytest.mark.parametrize("rate", [16000, 22050, 44100])
@pytest.mark.parametrize("hertz", [440, 1000, 5000])
def test_a_tone_is_bright_at_its_band_at_any_rate(rate, hertz):
    shown = levels(wav(sine(hertz, rate=rate, loudness=0.5), rate))
    assert shown.shape == (BANDS, 20)
    middle = shown[:, 3:-3].astype(int)
    assert set(middle.argmax(0)) <= {band_of(hertz) - 1, band_of(hertz), band_of(hertz) + 1}
    assert 215 < middle.max() < 255
    quiet = levels(wav(sine(hertz, rate=rate, loudness=0.05), rate))[:, 3:-3].astype(int)
    assert abs(middle.max() - quiet.max() - 255 * 20 / 80) <= 2  # 20 dB


def test_widths_and_channels_of_samples_show_the_same():
    tone = sine(1000, loudness=0.5)
    expected = levels(wav(tone)).astype(int)
    for file in (wav(tone, width=3), wav(tone, width=4), wav(tone, channels=2)):
        assert np.abs(levels(file).astype(int) - expected).max() <= 8
    loud = expected > 150  # what 8 bits have noise of
    assert np.abs(levels(wav(tone, width=1)).astype(int) - expected)[loud].max() <= 8


def test_a_sound_in_pieces_is_the_sound():
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 4000)
    whole, pieces = levels(wav(noise), 25), list(spectrogram().pieces(wav(noise), 10))
    assert [piece.shape for piece in pieces] == [(BANDS, 10)] * 3
    assert (np.concatenate(pieces, 1)[:, :25] == whole).all()
    assert not pieces[-1][:, 5:].any(), "silence"


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        (b"", ["empty", "header", "ffmpeg"]),
        (b"RIFF\0\0\0\0AVI ", ["WAVE", "ffmpeg"]),
        (wav(sine(440)).data[:3000], ["1,722 samples"]),
        (wav(np.zeros(0)).data, ["no samples"]),
        (wav(sine(440)).data[:34] + struct.pack("<H", 40) + wav(sine(440)).data[36:], ["40 bits", 16]),
        (wav(sine(440)).data.replace(struct.pack("<HH", 1, 1), struct.pack("<HH", 3, 1), 1), ["format: 3", "ffmpeg"]),
    ],
)
def test_what_cannot_be_read_is_named(data, facts):
    with pytest.raises(BrokenSound, match=naming("sound 'x'", *facts)):
        levels(BytesImage("x", data))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three sounds with texts beside them, of 0.1, 0.3 and 0.5 seconds."""
    for number, seconds in enumerate((0.1, 0.3, 0.5)):
        (tmp_path / f"{number}.wav").write_bytes(wav(sine(400, seconds)).data)
        (tmp_path / f"{number}.txt").write_text("low")
    return tmp_path


@pytest.mark.parametrize("any_size", [False, True])
def test_a_row_has_the_patches_of_its_sounds_at_positions_of_their_own(build, folder, any_size):
    model = tiny_model(32, 16, any_size, images_per_sequence=4, patches_per_sequence=32)
    data = build(SoundText(path=str(folder), bands=32 if any_size else 0), model=model, seq_len=40)
    # 10, 30 and 50 spectra: of one size, pieces of 16; of any, 2 columns of 4 patches a piece at most.
    assert [int((row["input_ids"] == SOUND).sum()) for row in data] == [8, 16, 28 if any_size else 32]
    last = [1, 4, 1] if any_size else [1, 4, 2]
    expected = [[[1, 4, 2]], [[1, 4, 2]] * 2, [*[[1, 4, 2]] * 3, last]]
    assert [row[GRIDS][row[GRIDS][:, 0] > 0].tolist() for row in data] == expected
    assert data[2][PATCHES][:28].reshape(-1, 3, 64).std(1).max() == 0, "grey"
    assert data[0][PATCHES][:8].max() > 200
    records = [json.dumps({"sound": f"{folder}/{number}.wav", "text": "low"}) for number in range(3)]
    (folder / "sounds.jsonl").write_text("\n".join(records))
    keys = {"path": "json", "data_files": f"{folder}/sounds.jsonl", "lanes": 1, "bands": 32 if any_size else 0}
    stream = build(SoundTextStream(**keys), model=model, seq_len=40).read(0, None)
    for (row, _), whole in zip(stream, data, strict=False):
        assert all((row[name] == whole[name]).all() for name in whole)


def test_keys_that_do_not_suit_the_model_and_models_that_see_no_sounds_are_refused(make_job, folder):
    def problems(model, **keys):
        source = SoundText(path=str(folder), **keys)
        return list(source.problems(make_job(source, model=model), Layout()))

    model = tiny_model(32, 16)
    assert problems(model) == []
    check_problems(problems(model, bands=16), at("bands", 16, "32 x 16 pixels"))
    check_problems(problems(attrs.evolve(model, fusion=CrossAttention())), at("", "sounds"))
    tower = TiledViT(dim=16, layers=1, global_layers=1, heads=2, patch=4, tile=8, intermediate=())
    tiled = attrs.evolve(model, vision=VisionPart(encoder=tower, adapter=LinearAdapter(), images_per_sequence=2))
    check_problems(problems(tiled), at("", "tiles"))
    check_problems(problems(tiny_model(32, 16, True, patches_per_sequence=32), bands=12), at("bands", 12, 8))
    check_problems(problems(model, max_patches=8), at("max_patches", 8, "one size"))
    check_problems(
        problems(tiny_model(32, 16, True, patches_per_sequence=32), max_patches=33), at("max_patches", 33, 32)
    )
    check_problems(
        problems(tiny_model(32, 16, True, patches_per_sequence=3)),
        at("max_patches", "8 patches", "model.vision.patches_per_sequence"),
    )


def test_decoding_finds_a_sound_that_ends_early():
    file, model = BytesImage("x", wav(sine(400, 0.3)).data[:-500]), attrs.evolve(tiny_model(32, 16), fusion=Joint())
    visual = SoundVisual(file, spectrogram(), model.image_input(), 16)
    assert visual.measure().patches == 16
    with pytest.raises(BrokenSound, match=naming("sound 'x'", "250 samples")):
        visual.check()
