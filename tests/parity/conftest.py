"""Puts the harness on the path, as it is when `kill.py` runs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
