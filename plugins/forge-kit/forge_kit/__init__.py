"""Building blocks that Forge plugins share: whole matrices, layers, token files, the dispatch of tokens."""
