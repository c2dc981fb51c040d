"""``python -m transportkit.cli``; the guard is for the processes that the demo spawns."""

from __future__ import annotations

import sys

from transportkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
