"""Architectures that see images: what they have beyond the tables of a text model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from forge_plugin_weights.kinds import TIED, ArchitectureComponent, Config, Flat

if TYPE_CHECKING:
    from forge_core.contracts.components import ModelComponent
    from forge_core.plugins.catalog import Catalog


@frozen(kw_only=True)
class VisionLanguageArchitecture(ArchitectureComponent):
    """A language model together with a vision tower: the tokenizer has tokens for images, exports have a processor."""

    table = ""  # it is the larger model, and a part of none
    image_token: ClassVar[str] = ""
    """The key with the id of the token that stands for an image; empty: `config.json` has none."""
    marks: ClassVar[Mapping[str, str]] = {}
    """Keys with ids of further tokens of the tokenizer, and those tokens."""
    video_processor: ClassVar[str] = ""
    """Class of the video processor, if it sees videos."""
    begins_with_image: ClassVar[bool] = False
    """Whether the beginning of text stands behind a document's image, so that the tokenizer puts none before it."""

    def placeholders_from(self, config: Config) -> int | None:
        """Returns the first id of tokens that the head has no row for, as they only mark where images stand, if any."""
        return None

    def processor_settings(self, config: Config) -> Mapping[str, Any]:
        """Returns the content of a `processor_config.json` for an export's `config.json`; empty: there is none."""
        return {}

    def videos(self, model: Flat) -> Mapping[str, Any]:
        """Returns the keys of a table `[data.sources.video]` that shows videos as the published model saw them."""
        return {}


@frozen(kw_only=True)
class VisionTowerArchitecture(ArchitectureComponent):
    """A vision tower without a language model, so without a tokenizer, special tokens and a longest sequence."""

    table = "vision_config"

    def part_of(self, config: Config) -> Config:
        """Returns the tower's configuration; whether the larger model's head is tied does not concern it."""
        return super().part_of({key: value for key, value in config.items() if key != TIED})

    def part_of_model(self, model: ModelComponent, catalog: Catalog) -> ModelComponent:
        """Returns the tower of a vision-language model; any other model as it is."""
        return model

    def has_tensor(self, name: str) -> bool:
        """Whether a tensor of such a larger model is of the tower."""
        return True
