"""The live console in a terminal emulator: log records stay complete, above the bar."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pyte
import pytest
from conftest import PROGRAMS, TIMEOUT_SECS, environment

LINES = 200


def screen_after(command, columns):
    """Returns (lines of a terminal with `columns` after `command` has ended, exit code)."""
    test_end, program_end = pty.openpty()
    fcntl.ioctl(program_end, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    variables = environment(TERM="xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        variables.pop(name, None)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), program_end)
    process = subprocess.Popen(command, **streams, env=variables)
    os.close(program_end)
    screen = pyte.Screen(columns, LINES)
    stream = pyte.ByteStream(screen)
    while True:
        try:
            data = os.read(test_end, 1 << 16)
        except OSError:  # Linux: the last process has closed the terminal
            break
        if not data:
            break
        stream.feed(data)
    os.close(test_end)
    return [line.rstrip() for line in screen.display if line.strip()], process.wait(TIMEOUT_SECS)


@pytest.mark.parametrize("columns", [80, 120])
def test_log_records_stay_complete_above_the_bar(columns, tmp_path):
    command = [sys.executable, str(PROGRAMS / "logging_trainer.py"), f"--model_dir={tmp_path}",
               "--export=none", "--train_steps=60", "--eval_every_steps=10", "--global_batch_size=8",
               "--steps_per_loop=5"]  # fmt: skip
    lines, code = screen_after(command, columns)
    text = "\n".join(lines)
    assert code == 0, text
    joined = re.sub(r"\s+", " ", text)
    for step in (10, 20, 30, 40):
        assert len(re.findall(rf"\] a warning of ctl at step {step}(?!\d)", joined)) == 1, text
    for step in (5, 15, 25, 35):
        assert len(re.findall(rf"\] a warning of absl at step {step}(?!\d)", joined)) == 1, text
        assert f"printed at step {step}" in lines, text
    assert len(re.findall("Stopping at step 40: eval loss has not improved for 3 evaluations", joined)) == 1
    bars = [line for line in lines if line.startswith("train ━")]
    assert len(bars) == 1 and "40/60" in bars[0], text
    assert not [line for line in lines if "━" in line and "warning" in line], text
    end = re.sub(r"\s+", " ", " ".join(lines[lines.index(bars[0]) + 2 :]))
    assert end.startswith("Stopped at step 40: eval loss has not improved for 3 evaluations; best"), text
    assert " at step 10. Restored the weights of step 10. steps 40" in end, text
