"""Entry point of `python -m ctl.launch`, which is the same as `ctl launch`."""

import sys

from ctl.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
