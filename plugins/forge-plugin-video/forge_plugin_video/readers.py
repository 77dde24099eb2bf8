"""The video readers as components."""

from __future__ import annotations

from attrs import frozen

from forge_plugin_video.kinds import VideoReader, VideoReaderComponent


@frozen(kw_only=True)
class PyAV(VideoReaderComponent):
    """Reads with PyAV, whose wheel brings FFmpeg and its decoders."""

    def build(self) -> VideoReader:
        from forge_plugin_video.readers_pyav import PyAVReader

        return PyAVReader(max_duration=self.max_duration)
