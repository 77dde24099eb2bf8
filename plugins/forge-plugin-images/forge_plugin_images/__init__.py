"""Images, videos and sounds as data for Forge: captions, documents, chats and drawn words.

From files to rows: `source_files` finds the files, `records` reads their content, `documents` are made of tokens and
images, which `decoding` opens, `resize` gives a size and `processing` turns into patches; `index` lists the room that
each document needs, `plan` puts documents into rows, and `dataset` reads the rows. The subpackage `video` has clips
with captions and drawn motion, and the readers and samplings of their frames.
"""

from forge_plugin_images.file_dataset import FileDataset
from forge_plugin_images.image_chat import ImageChat, ImageChatStream
from forge_plugin_images.image_keys import HasImages
from forge_plugin_images.image_prompts import ImagePrompts
from forge_plugin_images.image_text import ImageText, ImageTextStream
from forge_plugin_images.interleaved import Interleaved, InterleavedStream
from forge_plugin_images.rendered_text import RenderedText
from forge_plugin_images.resize import ResizeComponent, Resizer
from forge_plugin_images.sound_text import SoundText, SoundTextStream
from forge_plugin_images.source import DocumentDataset
from forge_plugin_images.stream_dataset import StreamDataset
from forge_plugin_images.video_kind import Span, VideoComponent, Videos

__all__ = [
    "DocumentDataset",
    "FileDataset",
    "HasImages",
    "ImageChat",
    "ImageChatStream",
    "ImagePrompts",
    "ImageText",
    "ImageTextStream",
    "Interleaved",
    "InterleavedStream",
    "RenderedText",
    "ResizeComponent",
    "Resizer",
    "SoundText",
    "SoundTextStream",
    "Span",
    "StreamDataset",
    "VideoComponent",
    "Videos",
]
