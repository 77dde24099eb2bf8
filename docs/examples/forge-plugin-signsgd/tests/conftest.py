"""The fixtures `make_job`, `train` and `lines`."""

pytest_plugins = ["forge_testing.fixtures"]
