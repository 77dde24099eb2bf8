"""trackio keeps its files in one folder a process, which it asks for when it is imported."""

from __future__ import annotations

import os
import sys
import tempfile

if "trackio" not in sys.modules:
    os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="trackio-")
    # Nothing of these tests needs Hugging Face
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
