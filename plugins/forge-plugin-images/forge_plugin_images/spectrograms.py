"""Sounds as grey images: logarithmic mel spectrograms of WAV files, a piece at a time.

M: mel bands, T: spectra of a piece, n: samples of a window, F: size of the Fourier transform.
"""

from __future__ import annotations

import wave
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
from attrs import frozen

from forge_plugin_images.image_file import BrokenImage, ImageFile


class BrokenSound(BrokenImage):
    """A sound that cannot be read; the message names it and gives the reason."""


class Wav(NamedTuple):
    """The values in the header of a WAV file."""

    rate: int
    """Samples of a channel in a second."""
    samples: int
    """Of a channel."""
    channels: int
    width: int
    """Bytes of a sample."""


@frozen
class Spectrogram:
    """How a sound becomes levels of grey: the lowest band below, time to the right."""

    bands: int
    """M."""
    hop: float
    """Seconds from one spectrum to the next."""
    window: float
    """Seconds that a spectrum is of, weighted by a Hann window."""
    frequencies: tuple[float, float]
    """Hertz: where the lowest band begins, and the highest ends."""
    decibels: tuple[float, float]
    """Levels that are black and white; a sine of full scale has 0."""

    def spectra(self, wav: Wav) -> int:
        """Returns the number of spectra of a sound: as many whole hops as there are, at least one."""
        return max(1, int(wav.samples / wav.rate / self.hop + 1e-6))  # 0.3 / 0.01 is a little less than 30

    def probe(self, file: ImageFile) -> Wav:
        """Returns the values in the header; raises `BrokenSound`."""
        with _opened(file) as reader:
            return self._checked(file, reader)

    def pieces(self, file: ImageFile, spectra: int) -> Iterator[np.ndarray]:
        """Yields a sound as images of so many spectra, (M, T) uint8, the last one filled up with silence.

        Only the samples of a piece are in memory.

        Raises:
            BrokenSound: it cannot be read to its end.
        """
        with _opened(file) as reader:
            wav = self._checked(file, reader)
            for start in range(0, self.spectra(wav), spectra):
                count = min(spectra, self.spectra(wav) - start)
                levels = np.zeros((self.bands, spectra), np.uint8)
                levels[:, :count] = self._levels(file, reader, wav, start, count)
                yield levels

    def _levels(self, file: ImageFile, reader: wave.Wave_read, wav: Wav, start: int, count: int) -> np.ndarray:
        """Returns spectra `start` to `start + count` as levels, (M, count) uint8."""
        # Of each spectrum, the samples around the middle of its hop.
        length = max(1, round(self.window * wav.rate))
        starts = np.round((np.arange(start, start + count) + 0.5) * self.hop * wav.rate - length / 2).astype(np.int64)
        first, end = max(0, int(starts[0])), min(wav.samples, int(starts[-1]) + length)
        reader.setpos(first)
        samples = _mono(file, reader.readframes(end - first), wav, end - first)
        # Silence where the first windows start before the sound, or the last ones end after it
        padded = np.pad(samples, (max(0, -int(starts[0])), max(0, int(starts[-1]) + length - end)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, length)[starts - starts[0]]
        return self._of_windows(windows, wav.rate)

    def _of_windows(self, windows: np.ndarray, rate: int) -> np.ndarray:
        """Returns the levels of windows (count, n): (M, count) uint8."""
        # numpy's window has a zero at each end, which would waste two samples.
        hann = np.hanning(windows.shape[1] + 2)[1:-1]
        # A power of two, as the transform is fastest there
        size = 1 << (windows.shape[1] - 1).bit_length()
        # Divided by the peak of a sine of full scale, which so has 0 decibels
        power = np.abs(np.fft.rfft(windows * hann, size)) ** 2 / (hann.sum() / 2) ** 2
        bands = power @ _filters(self.bands, size, rate, self.frequencies)
        black, white = self.decibels
        # 1e-20 is -200 dB: silence is a number
        shares = (10 * np.log10(bands + 1e-20) - black) / (white - black)
        return (shares.clip(0, 1) * 255).round().astype(np.uint8).T[::-1]

    def _checked(self, file: ImageFile, reader: wave.Wave_read) -> Wav:
        wav = Wav(reader.getframerate(), reader.getnframes(), reader.getnchannels(), reader.getsampwidth())
        if not wav.samples:
            raise BrokenSound(f"sound {file.name!r} cannot be read (it has no samples)")
        if wav.width not in (1, 2, 3, 4):
            raise BrokenSound(f"sound {file.name!r} cannot be read (samples of {8 * wav.width} bits; convert it to 16)")
        return wav


@contextmanager
def _opened(file: ImageFile) -> Iterator[wave.Wave_read]:
    try:
        with file.open() as stream, wave.open(stream) as reader:
            yield reader
    except (OSError, EOFError, wave.Error, RuntimeError, ValueError) as error:
        reason = str(error) or "the file is empty, or ends within its header"
        hint = "sounds are WAV files of whole numbers (PCM); convert it: ffmpeg -i FILE -c:a pcm_s16le FILE.wav"
        raise BrokenSound(f"sound {file.name!r} cannot be read ({reason}); {hint}") from error


def _mono(file: ImageFile, data: bytes, wav: Wav, samples: int) -> np.ndarray:
    """Returns the mean of all channels in [-1, 1], (samples,) float32."""
    if len(data) < samples * wav.channels * wav.width:
        there = f"it is {samples - len(data) // (wav.channels * wav.width):,} samples shorter than its header states"
        raise BrokenSound(f"sound {file.name!r} cannot be read (truncated: {there})")
    if wav.width == 3:  # as the upper three bytes of four
        values = np.zeros((samples * wav.channels, 4), np.uint8)
        values[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        whole = values.reshape(-1).view("<i4")
    else:
        whole = np.frombuffer(data, {1: "u1", 2: "<i2", 4: "<i4"}[wav.width])
    middle, full = (128, 128) if wav.width == 1 else (0, 2 ** (8 * whole.dtype.itemsize - 1))
    scaled: np.ndarray = (whole.astype(np.float32) - np.float32(middle)) / np.float32(full)
    return scaled.reshape(-1, wav.channels).mean(1)


@cache
def _filters(bands: int, size: int, rate: int, frequencies: tuple[float, float]) -> np.ndarray:
    """Returns triangles on the mel scale (F / 2 + 1, M), of height 1; a band without a bin has its nearest.

    Frequencies above half of the rate have no power.
    """
    # The mel scale of O'Shaughnessy (1987), which HTK uses; librosa's default is another
    low, high = (2595 * np.log10(1 + each / 700) for each in frequencies)
    edges = 700 * (10 ** (np.linspace(low, high, bands + 2) / 2595) - 1)
    bins = np.fft.rfftfreq(size, 1 / rate)
    rising = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    filters = np.minimum(rising, falling).clip(0)
    centres = edges[1:-1]
    # Low bands may be narrower than a bin; without power they would be black whatever the sound is.
    empty = np.flatnonzero((filters.sum(0) == 0) & (centres <= rate / 2))
    filters[np.abs(bins[:, None] - centres[empty]).argmin(0), empty] = 1
    return filters
