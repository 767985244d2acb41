"""`python -m ctl.runner`: the same as `ctlrun`."""

import sys

from ctl.runner.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
