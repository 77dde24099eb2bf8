"""Lets the tests of this folder import `grpo_runs`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
