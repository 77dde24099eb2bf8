"""The command `forge-run generate`: text from a trained Forge model."""
