"""Output of the `ctl` and `ctlrun` commands to a closed pipe."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TIMEOUT_SECS, environment


@pytest.mark.parametrize("command", [
    ["ctl", "--help"], ["ctl", "launch", "--help"], ["ctl", "deploy", "vertex", "--help"],
    ["ctl", "inspect", "--help"], ["ctlrun", "--help"],
])  # fmt: skip
def test_a_closed_pipe_of_the_help_is_no_error(command):
    program = Path(sys.executable).parent / command[0]
    process = subprocess.Popen([program, *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=environment())  # fmt: skip
    process.stdout.close()  # as `| head -1` does
    err = process.stderr.read()
    assert (process.wait(TIMEOUT_SECS), err) == (0, b"")
