"""`python -m pipedist` is the command `pipedist`."""

from __future__ import annotations

import sys

if not sys.flags.safe_path:
    # python -m puts the current directory first; a file there must not stand for a module
    del sys.path[0]

from pipedist.cli import main

if __name__ == "__main__":
    main()
