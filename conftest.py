"""Fixtures for every test, the plugins' included."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parent / "tests"))

# A busy machine is not an error: an example may take as long as it takes.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

pytest_plugins = ["forge_testing.fixtures", "command_line"]
