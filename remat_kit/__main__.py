"""`python -m remat_kit`: the same as the command `remat-kit`."""

import sys

from remat_kit.cli import main

if __name__ == "__main__":
    sys.exit(main())
