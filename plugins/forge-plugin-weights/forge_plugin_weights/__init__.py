"""Published models in and out of Forge, and the kind `architecture`."""

from forge_plugin_weights.export_hook import Export
from forge_plugin_weights.kinds import ArchitectureComponent, Config, Field, Flat, Part, Rule, Shapes, Unsupported
from forge_plugin_weights.vision_kinds import VisionLanguageArchitecture, VisionTowerArchitecture

__all__ = [
    "ArchitectureComponent",
    "Config",
    "Export",
    "Field",
    "Flat",
    "Part",
    "Rule",
    "Shapes",
    "Unsupported",
    "VisionLanguageArchitecture",
    "VisionTowerArchitecture",
]
