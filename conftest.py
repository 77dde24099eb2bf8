"""Fixtures for every test, the plugins' included."""

pytest_plugins = ["forge_core.testing.fixtures"]
