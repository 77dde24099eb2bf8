"""Puts the tests of skills, whose folder these tasks begin in, on the path."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "docs")]
