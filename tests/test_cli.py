"""The `ctl` and `ctlrun` commands, where their output ends early."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TIMEOUT_SECS, environment


@pytest.mark.parametrize("words", [
    ["ctl", "--help"], ["ctl", "launch", "--help"], ["ctl", "deploy", "vertex", "--help"],
    ["ctl", "inspect", "--help"], ["ctlrun", "--help"],
])  # fmt: skip
def test_help_that_nobody_reads_to_the_end_is_no_error(words):
    command = Path(sys.executable).parent / words[0]
    process = subprocess.Popen([command, *words[1:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=environment())  # fmt: skip
    process.stdout.close()  # as `| head -1` does
    err = process.stderr.read()
    assert (process.wait(TIMEOUT_SECS), err) == (0, b"")
