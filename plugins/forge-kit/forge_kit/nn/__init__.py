"""Parts of models, and what stages and tools need to know of a model."""
