"""Modules that the plugin puts into a model."""
