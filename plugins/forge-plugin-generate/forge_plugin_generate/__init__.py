"""The commands `forge-run generate` and `chat`: text from a trained Forge model."""

from forge_plugin_generate.kinds import PromptEntriesComponent, PromptMaker, Prompts

__all__ = ["PromptEntriesComponent", "PromptMaker", "Prompts"]
