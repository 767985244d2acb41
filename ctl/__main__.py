"""`python -m ctl`: the same as the `ctl` command."""

import sys

from ctl.cli import main

if __name__ == "__main__":
    sys.exit(main())
