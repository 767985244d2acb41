"""Output of workers: logs on a full disk, and messages of the launcher above a live progress bar."""

import os
import re
import sys

import pytest
from ctl.io.console import print_message
from ctl.launch import log_files, output
from ctl.launch.host_allocation import RoleCounts, build_tasks
from ctl.launch.log_files import LogFile
from ctl.launch.output import LogOutput
from launching import read_until
from small_disks import fill, mounted


def test_a_log_continues_when_the_disk_has_space_again_and_counts_the_missing_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(log_files, "_RETRY_SECS", 0.0)
    with mounted(tmp_path / "small", "1m") as disk:
        path = disk / "logs" / "job_1.log"
        log = LogFile(path, "ctl launch")
        log.write(b"first\n")
        fill(disk / "filler")
        log.write(b"x" * 5000)
        log.write(b"y" * 100_000)
        written_bytes = path.stat().st_size
        (disk / "filler").unlink()
        log.write(b"last\n")
        log.close()
        text = path.read_text()
    missing = int(re.search(r"\nctl launch: (\d+) bytes were dropped here\nlast\n$", text)[1])
    assert text.startswith("first\n") and missing == len("first\n") + 105_000 - written_bytes


def test_workers_train_although_no_byte_can_be_written_to_their_logs(job, tmp_path):
    with mounted(tmp_path / "small", "1m") as disk:
        fill(disk / "filler")
        job.logs = disk / "logs"
        code, out, err = job.run(
            """
            for i in range(3000): print("a line", i, flush=True)
            (here / f"trained_{job}").touch()
            """,
            "--workers=2",
        )
    assert code == 0 and "Traceback" not in err, err
    assert (job.dir / "trained_0").exists() and (job.dir / "trained_1").exists()
    assert out.count(b"a line") == 3000
    assert "cannot be written (No space left on device)" in err


@pytest.mark.parametrize("height", [1, 3])
def test_a_message_of_the_launcher_replaces_a_live_bar_which_is_drawn_again_below(
    tmp_path, monkeypatch, height
):
    """The bar is drawn like those of rich, which erases the lines of the last bar from the bottom up."""
    test_end, console = os.openpty()
    monkeypatch.setattr(output, "_STDOUT", console)
    monkeypatch.setattr(output, "_is_one_terminal", lambda: True)
    stdout = open(console, "w", closefd=False)  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stdout)
    [task] = build_tasks(RoleCounts(workers=1), "127.0.0.1")
    copied_output = LogOutput(tmp_path, [task])
    writer = copied_output.open_writers(task)[0]
    copied_output.start()
    bar = b"\n".join(b"bar %d" % i for i in range(height))
    redraw = b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * (height - 1) + bar
    os.write(writer, b"before\n" + bar + redraw + b"READY")
    printed = read_until(test_end, b"READY")
    print_message("a message")
    os.write(writer, redraw + b"END")
    printed += read_until(test_end, b"END")
    copied_output.finish()
    bars = [f"bar {i}" for i in range(height)]
    assert screen_of(printed) == ["before", "ctl launch: a message", *bars[:-1], f"{bars[-1]}END"]
    stdout.close()
    os.close(test_end)
    os.close(console)


def screen_of(data):
    """Returns the lines on a terminal after `data` with two kinds of control sequences."""
    lines, row = [""], 0
    for part in re.findall(rb"\x1b\[1A|\x1b\[2K|\r|\n|[^\x1b\r\n]+", data):
        if part == b"\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == b"\x1b[1A":
            row -= 1
        elif part == b"\x1b[2K":
            lines[row] = ""
        elif part != b"\r":
            lines[row] += part.decode()
    return lines
