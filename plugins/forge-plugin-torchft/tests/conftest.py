"""Makes `torchft_groups`, which both files of tests use, importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
