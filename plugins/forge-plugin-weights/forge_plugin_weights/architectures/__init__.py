"""Tables of published architectures."""
