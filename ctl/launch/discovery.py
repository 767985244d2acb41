"""Host discovery with a program that prints a line for each available host.

    found = run_discovery("./hosts.sh")
    found.hosts        -> [Host("host1", 2)], or [] with the reason in `found.problem`
    poller = HostPoller("./hosts.sh")           # runs it repeatedly in a thread
    poller.poll()    -> a Discovery that was not returned before, or None

The program runs without a shell and without arguments. If it fails, hangs or prints invalid output, the
result has a `problem` and no exception is raised, because the next run may succeed.
"""

import contextlib
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

from ctl.errors import UsageError
from ctl.io.console import quoted
from ctl.launch.hosts import Host, parse_host_lines
from ctl.launch.process_tree import die_with_parent, kill_group

DISCOVERY_TIMEOUT_SECS = 30.0
_POLL_INTERVAL_SECS = 1.0  # between two runs of a poller
_WAIT_SECS = 0.05
_MAX_OUTPUT_BYTES = 65536


@dataclass(frozen=True)
class Discovery:
    """The printed hosts, or the reason for an empty list.

    `is_broken`: The program itself failed, so the list of hosts is unknown.
    """

    hosts: Sequence[Host] = field(default_factory=list)
    problem: str = ""
    is_broken: bool = False

    @property
    def slots(self) -> int:
        """Number of workers for these hosts."""
        return sum(host.slots for host in self.hosts)


class HostPoller:
    """A thread that runs the discovery program repeatedly. The kernel ends the program with the thread."""

    def __init__(self, script: str, slots: int = 1, option: str = "--host-discovery-script"):
        self.option = option  # that names the program, for messages
        self.hosts: Sequence[Host] = ()  # hosts that are available before the first run
        self._script = script
        self._slots = slots
        self._discoveries: queue.SimpleQueue[Discovery] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="discovery", daemon=True)
        self._thread.start()

    def poll(self) -> Discovery | None:
        """Returns the newest result once, else None."""
        discovery = None
        while not self._discoveries.empty():
            discovery = self._discoveries.get()
        return discovery

    def stop(self) -> None:
        """Ends the program if it runs."""
        self._stopped.set()
        self._thread.join(5.0)

    def _poll(self) -> None:
        while not self._stopped.is_set():
            discovery = run_discovery(self._script, interrupted=self._stopped.is_set, slots=self._slots)
            self._discoveries.put(discovery)
            self._stopped.wait(_POLL_INTERVAL_SECS)


class FixedHosts:
    """A host source with the interface of `HostPoller` for a constant list of hosts."""

    option = "-H"

    def __init__(self, hosts: Sequence[Host]):
        self.hosts = hosts
        self._discoveries: Discovery | None = Discovery(hosts)

    def poll(self) -> Discovery | None:
        """Returns the hosts on the first call, else None."""
        discovery, self._discoveries = self._discoveries, None
        return discovery

    def stop(self) -> None:
        """Has no effect: no program runs."""


HostSource = HostPoller | FixedHosts


def find_script(script: str, option: str) -> str:
    """Returns the path of the program of an option. Raises UsageError if it cannot be executed."""
    path = shutil.which(script)
    if path is None:
        raise UsageError(
            f"{option}{quoted(script)} cannot be run; expected the path of an executable file that "
            "prints a line `host:slots` for each host"
        )
    return path


def run_discovery(
    script: str,
    timeout_secs: float = DISCOVERY_TIMEOUT_SECS,
    interrupted: Callable[[], bool] = lambda: False,
    slots: int = 1,
) -> Discovery:
    """Runs the program once, and kills it after `timeout_secs` or if `interrupted()`.

    Args:
      script: Path of the program.
      timeout_secs: Timeout (seconds).
      interrupted: Polled while the program runs.
      slots: Slots of a host that is printed without a number.
    """
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            popen = subprocess.Popen(
                [script],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 (it only calls into C)
            )
        except OSError as e:
            return Discovery(problem=f"{script!r} cannot be run ({e.strerror or e})", is_broken=True)
        deadline_secs = time.monotonic() + timeout_secs
        while popen.poll() is None and time.monotonic() < deadline_secs and not interrupted():
            time.sleep(_WAIT_SECS)
        timed_out = popen.poll() is None
        kill_group(popen.pid)
        popen.wait()
        if timed_out:
            problem = f"{script!r} did not end within {timeout_secs:g} s"
            return Discovery(problem=problem, is_broken=True)
        return parse_discovery(script, popen.returncode, _read_text(stdout), _read_text(stderr), slots)


def parse_discovery(script: str, returncode: int, stdout: str, stderr: str, slots: int = 1) -> Discovery:
    """Returns the hosts that the program printed, or a description of the error."""
    error_line = next((line.strip()[:200] for line in reversed(stderr.splitlines()) if line.strip()), "")
    if returncode:
        reason = f"exit code {returncode}" if returncode > 0 else f"signal {-returncode}"
        suffix = f", {error_line}" if error_line else ""
        return Discovery(problem=f"{script!r} failed: {reason}{suffix}", is_broken=True)
    try:
        hosts = parse_host_lines(stdout.splitlines(), slots)
    except UsageError as e:
        return Discovery(problem=f"{script!r} printed an invalid line: {e}", is_broken=True)
    return Discovery(hosts, "" if hosts else f"{script!r} printed no host")


def _read_text(file: IO[bytes]) -> str:
    with contextlib.suppress(OSError):
        file.seek(0)
        return file.read(_MAX_OUTPUT_BYTES).decode(errors="replace")
    return ""
