"""``python -m transportkit``: the command line, where the script `transportkit` is not on the path; nothing else."""

from __future__ import annotations

import sys

from transportkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
