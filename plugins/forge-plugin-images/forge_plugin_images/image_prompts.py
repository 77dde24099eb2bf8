"""The type `images` of the kind `prompt_entries`: prompts of `forge-run generate --image` and `--video`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from forge_plugin_generate import PromptEntriesComponent, PromptMaker

if TYPE_CHECKING:
    from forge_core.contracts.data import Tokenizer
    from forge_core.job import Job
    from forge_plugin_generate import Prompts


@frozen(kw_only=True)
class ImagePrompts(PromptEntriesComponent):
    """Prompts with images and videos at `<image>` and `<video>`, resized as in training."""

    def build(self) -> PromptMaker:
        """Returns a function that makes the prompts; Pillow is imported only when it is called."""
        return _prompts


def _prompts(
    texts: Sequence[str], files: Mapping[str, Sequence[str]], job: Job, tokenizer: Tokenizer, *, bos: bool
) -> Prompts:
    from forge_plugin_images.prompts import prompts_with_images

    images, videos = (files.get(name, ()) for name in ("image", "video"))
    return prompts_with_images(texts, images, job, tokenizer, bos=bos, videos=videos)
