"""Starts the recorders of `reached.py` and `unprovoked.py` in each Python process whose path has this folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import reached  # noqa: F401
import unprovoked  # noqa: F401
