"""Exit codes of scripts that use `ctl` without `ctl.run`."""

import subprocess
import sys

import pytest
from conftest import TIMEOUT_SECS, environment

SCRIPT = """
import atexit
import ctl
from ctl import endings
endings.install()
endings.install()
atexit.register(lambda: print("tidied up"))
print("first")
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code", "tidied"),
    [
        ("ctl.UsageError('a wrong flag')", 2, True),
        ("ctl.NonFiniteError('NaN')", 1, True),
        ("ctl.PeerLostError('worker 1 is gone')", 134, False),
        ("ctl.Stopped('by SIGTERM', 143)", 143, True),
        ("ValueError('not ours')", 1, True),
    ],
)
def test_an_uncaught_error_ends_the_process_with_its_exit_code(error, code, tidied):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(error=error)], env=environment(), capture_output=True,
        text=True, timeout=TIMEOUT_SECS, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert done.stdout == "first\n" + "tidied up\n" * tidied
    if code != 143:
        assert error.partition("'")[2].rstrip("')") in done.stderr
