"""Fixtures for every test, the plugins' included."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "tests"))

pytest_plugins = ["forge_testing.fixtures", "command_line"]
