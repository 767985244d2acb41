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
    """The hosts that were named, and why there are none.

    `is_broken`: the program itself failed, so nobody knows whether there are any.
    """

    hosts: Sequence[Host] = field(default_factory=list)
    problem: str = ""
    is_broken: bool = False

    @property
    def slots(self) -> int:
        """How many workers they take."""
        return sum(host.slots for host in self.hosts)


def ask(
    script: str,
    timeout_secs: float = TIMEOUT_SECS,
    interrupted: Callable[[], bool] = lambda: False,
    slots: int = 1,
) -> Found:
    """Runs the program once; it is killed after `timeout_secs` or when `interrupted`.

    Args:
      slots: of a host that is named without a number.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            popen = subprocess.Popen(
                [script], stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 (it only calls into C)
            )  # fmt: skip
        except OSError as e:
            return Found(problem=f"{script!r} cannot be run ({e.strerror or e})", is_broken=True)
        until_secs = time.monotonic() + timeout_secs
        while popen.poll() is None and time.monotonic() < until_secs and not interrupted():
            time.sleep(_POLL_SECS)
        hung = popen.poll() is None
        kill_group(popen.pid)
        popen.wait()
        if hung:
            return Found(
                problem=f"{script!r} did not end within {timeout_secs:g} s", is_broken=True
            )
        return understand(script, popen.returncode, _text(out), _text(err), slots)


def understand(script: str, returncode: int, out: str, err: str, slots: int = 1) -> Found:
    """What the program's end and words mean."""
    last = next((line.strip()[:200] for line in reversed(err.splitlines()) if line.strip()), "")
    if returncode:
        how = f"exit code {returncode}" if returncode > 0 else f"signal {-returncode}"
        said = f", {last}" if last else ""
        return Found(problem=f"{script!r} failed: {how}{said}", is_broken=True)
    try:
        hosts = read_lines(out.splitlines(), slots)
    except UsageError as e:
        return Found(problem=f"{script!r} printed what cannot be used: {e}", is_broken=True)
    return Found(hosts, "" if hosts else f"{script!r} printed no host")


def _text(file) -> str:
    with contextlib.suppress(OSError):
        file.seek(0)
        return file.read(_MOST_BYTES).decode(errors="replace")
    return ""
