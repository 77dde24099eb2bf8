"""The video readers as components."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen
from attrs.validators import min_len

from forge_core.contracts.errors import JobError, Problem
from forge_plugin_images.video.kinds import VideoReader, VideoReaderComponent

if TYPE_CHECKING:
    from forge_core.contracts.contexts import BuildContext
    from forge_core.contracts.layout import Layout
    from forge_core.job import Job

TORCHCODEC_NEEDS = (
    "it needs FFmpeg's shared libraries (4 to 8); of its Linux wheels on PyPI, 0.11.1 to 0.13 need no CUDA, and "
    "later ones need CUDA 13"
)


PYAV = "PyAV is not installed: pip install 'forge-plugin-images[video]'"


def pyav_problem() -> str:
    """Returns how to install PyAV, which reads the containers of clips; empty if it is there."""
    return "" if find_spec("av") else PYAV


class _ReadsContainers(VideoReaderComponent):
    """A reader for which PyAV reads the container."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks that PyAV is installed."""
        if reason := pyav_problem():
            yield Problem("", reason)

    def build(self) -> VideoReader:
        """Builds the reader; raises `JobError` if PyAV is not installed."""
        if reason := pyav_problem():  # of a prompt, for which no job is checked
            raise JobError(reason)
        return self._reader()

    def _reader(self) -> VideoReader:
        raise NotImplementedError


@frozen(kw_only=True)
class PyAV(_ReadsContainers):
    """Reads with PyAV, whose wheel brings FFmpeg and its decoders."""

    def _reader(self) -> VideoReader:
        from forge_plugin_images.video.readers_pyav import PyAVReader

        return PyAVReader(max_duration=self.max_duration)

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Names the versions of PyAV and FFmpeg, by which decoded pixels may differ."""
        yield "video_reader", "pyav", _pyav()


@frozen(kw_only=True)
class TorchCodec(_ReadsContainers):
    """Decodes with torchcodec, where it loads; PyAV reads the container."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks by importing it that torchcodec loads, which depends on shared libraries of the machine."""
        yield from super().problems(job, layout)
        if reason := torchcodec_problem():
            yield Problem("", f'torchcodec does not load ({reason}); {TORCHCODEC_NEEDS}; or take type = "pyav"')

    def _reader(self) -> VideoReader:
        from forge_plugin_images.video.readers_torchcodec import TorchCodecReader

        return TorchCodecReader(max_duration=self.max_duration)

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Names the version of torchcodec, by which decoded pixels may differ."""
        yield "video_reader", "torchcodec", _torchcodec()


@frozen(kw_only=True)
class Auto(_ReadsContainers):
    """The first reader that loads on this machine; the summary of the run shows which one."""

    prefer: tuple[Literal["pyav", "torchcodec"], ...] = field(default=("pyav", "torchcodec"), validator=min_len(1))
    """Readers, best first: PyAV takes less time for the same frames (docs/benchmarks.md), and notices damage."""

    def problems(self, job: Job, layout: Layout) -> Iterable[Problem]:
        """Checks torchcodec only where `prefer` has no other reader."""
        yield from super().problems(job, layout)
        if "pyav" not in self.prefer and (reason := torchcodec_problem()):
            yield Problem("prefer", f'torchcodec does not load ({reason}); add "pyav"')

    def _reader(self) -> VideoReader:
        return self._chosen().build()

    def choices(self, context: BuildContext) -> Iterable[tuple[str, str, str]]:
        """Names the chosen reader, and why torchcodec was passed over if it was preferred."""
        chosen = self._chosen()
        is_second = isinstance(chosen, PyAV) and self.prefer[0] != "pyav"
        why = f"; torchcodec does not load ({torchcodec_problem()})" if is_second else ""
        for subject, choice, reason in chosen.choices(context):
            yield subject, choice, reason + why

    def _chosen(self) -> VideoReaderComponent:
        is_torchcodec = self.prefer[0] == "torchcodec" and not ("pyav" in self.prefer and torchcodec_problem())
        return (TorchCodec if is_torchcodec else PyAV)(max_duration=self.max_duration)


def torchcodec_problem() -> str:
    """Returns why torchcodec does not load here; empty if it does."""
    try:
        import_module("torchcodec.decoders")
    except (ImportError, OSError, RuntimeError) as error:  # raised by itself, a shared library, FFmpeg
        root = error.__cause__ or error
        return str(root).strip().splitlines()[0]
    return ""


def _pyav() -> str:
    import av

    return f"PyAV {av.__version__} with FFmpeg {av.ffmpeg_version_info}"


def _torchcodec() -> str:
    return f"torchcodec {version('torchcodec')}"
