"""The program of one rank of `hvd.run`: calls the function, leaves what it returned.

    python -m ctl.launch.horovodrun.call DIRECTORY

DIRECTORY belongs to the process that started us, is closed to other users, and holds what it wrote: that
is why pickles are read from there, and from nowhere else.
"""

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from ctl.errors import EXIT_DONE, EXIT_FAILED

ASKED = "asked"  # the file with (function, args, kwargs)


def left_by(number: int) -> str:
    """The name of the file with (True, result) or (False, traceback) of a process."""
    return f"result.{number}"


def main(argv: list[str]) -> int:
    """Calls; the exit code says whether the function returned."""
    directory = Path(argv[0])
    number = os.environ.get("CTL_HVD_WORKER") or os.environ["HOROVOD_RANK"]
    try:
        with open(directory / ASKED, "rb") as file:
            paths = pickle.load(file)
            sys.path[:] = [*paths, *(p for p in sys.path if p not in paths)]
            function, args, kwargs = pickle.load(file)
        left: tuple[bool, Any] = (True, function(*args, **kwargs))
    except BaseException as e:
        if isinstance(e, SystemExit) and e.code in (None, 0):
            left = (True, None)
        else:
            traceback.print_exc()
            left = (False, traceback.format_exc())
    return _leave(directory / left_by(int(number)), left)


def _leave(path: Path, left: tuple[bool, Any]) -> int:
    try:
        data = pickle.dumps(left)
    except Exception as e:
        came = type(left[1]).__name__
        left = (False, f"what it returned, a {came}, cannot be passed on: {e}\n")
        data = pickle.dumps(left)
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    new.replace(path)
    return EXIT_DONE if left[0] else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
