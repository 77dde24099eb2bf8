"""Video for Forge: kinds `video_reader` and `frame_sampling`, and their types.

`kinds` defines the interfaces of readers and samplings, `readers` and `samplings` contain the types; `testing` encodes
clips whose frames carry their numbers.
"""

from forge_plugin_images.video.frames import Frames
from forge_plugin_images.video.kinds import BrokenVideo, Clip, FrameSamplingComponent, VideoReader, VideoReaderComponent
from forge_plugin_images.video.moving_shapes import MovingShapes
from forge_plugin_images.video.readers import Auto, PyAV, TorchCodec
from forge_plugin_images.video.samplings import Fps, Middle, Scene, Uniform
from forge_plugin_images.video.video_text import VideoText, VideoTextStream

__all__ = [
    "Auto",
    "BrokenVideo",
    "Clip",
    "Fps",
    "FrameSamplingComponent",
    "Frames",
    "Middle",
    "MovingShapes",
    "PyAV",
    "Scene",
    "TorchCodec",
    "Uniform",
    "VideoReader",
    "VideoReaderComponent",
    "VideoText",
    "VideoTextStream",
]
