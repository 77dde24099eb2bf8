"""`python -m forge_core` is `forge-run`."""

import sys

from forge_core.cli import main

sys.exit(main())
