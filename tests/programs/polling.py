"""The wait of a test for a state of files, processes or threads."""

import time
from collections.abc import Callable
from typing import Any

from conftest import TIMEOUT_SECS


def wait_until(
    condition: Callable[[], Any],
    process=None,
    *,
    show: Callable[[], str] = str,
    timeout_secs: float = TIMEOUT_SECS,
    pause_secs: float = 0.02,
) -> Any:
    """Polls `condition` until it holds. Returns its value.

    Fails after a generous timeout, or if `process` has ended before. The message contains `show()`.
    """
    deadline = time.monotonic() + timeout_secs
    while True:
        has_ended = process is not None and process.poll() is not None
        if value := condition():  # read after the end of the process
            return value
        assert not has_ended, f"it ended before\n{show()}"
        assert time.monotonic() < deadline, f"it took too long\n{show()}"
        time.sleep(pause_secs)
