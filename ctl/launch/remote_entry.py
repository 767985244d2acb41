"""Entry point of the launcher's remote end: a file that Python runs by its path.

    ssh host /path/to/python /path/to/ctl/launch/remote_entry.py

It derives the path of the package from its own, because PYTHONPATH and the directory arrive over the
connection only.
"""

import os
import sys


def main() -> int:
    """Runs `ctl.launch.remote` from the package that contains this file. Returns its exit code."""
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from ctl.launch.remote import serve_launcher

    return serve_launcher()


if __name__ == "__main__":
    sys.exit(main())
