"""Text from a trained Forge model: the commands `forge-run generate` and `chat`, and the hook `samples`."""

from forge_plugin_generate.kinds import PromptEntriesComponent, PromptMaker, Prompts

__all__ = ["PromptEntriesComponent", "PromptMaker", "Prompts"]
