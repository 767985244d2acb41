"""`python -m ctl.launch.horovodrun`: the same as `ctlrun`."""

import sys

from ctl.launch.horovodrun.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
