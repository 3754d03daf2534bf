"""`python -m lsq` is `lsq`."""

import sys

from lsq.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
