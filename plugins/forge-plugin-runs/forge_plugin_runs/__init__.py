"""Commands around the runs of Forge: list them, show one, resume one, and shell completion."""
