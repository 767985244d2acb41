"""A substitute for `python -m` with a pause after each line of metrics.jsonl.

    python slow_logs.py models.mnist --model_dir=...

A test that ends the run after some lines is then on time, also if the test is scheduled late.
"""

import runpy
import sys
import time

from ctl.metrics.jsonl import JsonlWriter

PAUSE_SECS = 0.3


def pause_after(write):
    """Returns the method `write` with the pause."""

    def write_and_pause(*arguments, **options):
        write(*arguments, **options)
        time.sleep(PAUSE_SECS)

    return write_and_pause


if __name__ == "__main__":
    JsonlWriter.write = pause_after(JsonlWriter.write)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
