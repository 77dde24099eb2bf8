"""The torch modules that this distribution's components build."""
