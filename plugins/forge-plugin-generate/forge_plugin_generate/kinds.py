"""The kind `prompt_entries`: what makes prompts of texts and files. Its types are other distributions'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from attrs import frozen

from forge_core.contracts.components import Component
from forge_core.contracts.errors import ForgeError

if TYPE_CHECKING:
    from torch import Tensor

    from forge_core.contracts.data import Tokenizer
    from forge_core.job import Job
    from forge_core.plugins.catalog import Catalog

USUAL = "forge-plugin-images/images"
"""The type that the command takes."""


class Prompts(NamedTuple):
    """Prompts for `forge_plugin_generate.generate.generate`."""

    ids: list[list[int]]
    """Tokens, and negative ids at positions that are none."""
    entries: dict[str, Tensor]
    """Further entries of the batch, each of shape (B, …), such as `patches`."""


class PromptMaker(Protocol):
    """Makes prompts."""

    def __call__(
        self, texts: Sequence[str], files: Mapping[str, Sequence[str]], job: Job, tokenizer: Tokenizer, *, bos: bool
    ) -> Prompts:
        """Returns the prompts of a batch.

        Args:
            texts: the texts of the prompts, with marks where files stand.
            files: names of the files of each option, `image` and `video`, in the order of their marks.
            job: the job of the model's training.
            tokenizer: the tokenizer of the model.
            bos: whether prompts begin with the tokenizer's beginning of text.

        Raises:
            ForgeError: texts and files do not go together, or a file cannot be read.
        """


@frozen(kw_only=True)
class PromptEntriesComponent(Component[PromptMaker]):
    """Makes prompts of texts and files, such as images."""

    kind = "prompt_entries"

    def build(self) -> PromptMaker:
        """Returns what makes the prompts."""
        raise NotImplementedError


def usual_prompt_maker(catalog: Catalog) -> PromptMaker:
    """Returns what makes prompts with images and videos; raises `ForgeError` if it is not installed."""
    from forge_kit.tools.commands import parse_component

    if not any(offer.qualified == USUAL for offer in catalog.offers(PromptEntriesComponent.kind)):
        name = USUAL.partition("/")[0]
        raise ForgeError(f"--image and --video need {name}; pip install {name}")
    return parse_component({"type": USUAL}, "--image", PromptEntriesComponent, catalog).build()
