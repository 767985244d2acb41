"""Which hosts are there now: asks a program that prints a line for each.

    found = ask("./hosts.sh")
    found.hosts        -> [Host("host1", 2)], or [] and `found.problem` says why

The program is run by itself, without a shell and without words. One that fails, hangs or prints
nonsense is a problem in words, never an exception: the next time it may know better.
"""

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ctl.errors import UsageError
from ctl.launch.groups import die_with_parent, kill_group
from ctl.launch.hosts import Host, read_lines

TIMEOUT_SECS = 30.0
_POLL_SECS = 0.05
_MOST_BYTES = 65536


@dataclass(frozen=True)
class Found:
    """The hosts that were named, and why there are none."""

    hosts: Sequence[Host] = field(default_factory=list)
    problem: str = ""

    @property
    def slots(self) -> int:
        """How many workers they take."""
        return sum(host.slots for host in self.hosts)


def ask(
    script: str,
    timeout_secs: float = TIMEOUT_SECS,
    interrupted: Callable[[], bool] = lambda: False,
) -> Found:
    """Runs the program once; it is killed after `timeout_secs` or when `interrupted`."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            popen = subprocess.Popen(
                [script], stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 (it only calls into C)
            )  # fmt: skip
        except OSError as e:
            return Found(problem=f"{script!r} cannot be run ({e.strerror or e})")
        until_secs = time.monotonic() + timeout_secs
        while popen.poll() is None and time.monotonic() < until_secs and not interrupted():
            time.sleep(_POLL_SECS)
        hung = popen.poll() is None
        kill_group(popen.pid)
        popen.wait()
        if hung:
            return Found(problem=f"{script!r} did not end within {timeout_secs:g} s")
        return understand(script, popen.returncode, _text(out), _text(err))


def understand(script: str, returncode: int, out: str, err: str) -> Found:
    """What the program's end and words mean."""
    last = next((line.strip()[:200] for line in reversed(err.splitlines()) if line.strip()), "")
    if returncode:
        how = f"exit code {returncode}" if returncode > 0 else f"signal {-returncode}"
        return Found(problem=f"{script!r} failed: {how}" + (f", {last}" if last else ""))
    try:
        hosts = read_lines(out.splitlines())
    except UsageError as e:
        return Found(problem=f"{script!r} printed what cannot be used: {e}")
    return Found(hosts, "" if hosts else f"{script!r} printed no host")


def _text(file) -> str:
    with contextlib.suppress(OSError):
        file.seek(0)
        return file.read(_MOST_BYTES).decode(errors="replace")
    return ""
