"""Runs the command line as `python -m tfamp`."""

import sys

from tfamp.cli import main

if __name__ == "__main__":
    sys.exit(main())
