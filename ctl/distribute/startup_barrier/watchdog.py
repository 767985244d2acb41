"""Watchdog of TensorFlow's start: a subprocess, since no thread of this process may be able to run."""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

from ctl.distribute.startup_barrier.messages import name_of
from ctl.distribute.topology import Topology

_log = logging.getLogger("ctl")

_WATCHDOG = """
import os, select, signal, sys
secs, pid, text = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if not select.select([0], [], [], secs)[0] and os.getppid() == pid:
    sys.stderr.write(text); sys.stderr.flush(); os.kill(pid, signal.SIGABRT)
"""


@contextlib.contextmanager
def limited(cluster: Topology, timeout_secs: float) -> Iterator[None]:
    """Ends this process with SIGABRT (exit code 134) if the block exceeds the timeout.

    Another process sends the signal: TensorFlow may hold the interpreter's lock within the block.
    """
    peers = [name_of(cluster, r) for r in range(cluster.num_workers) if r != cluster.worker_index]
    text = (
        f"ctl: all workers had connected, but TensorFlow has waited {timeout_secs:g} s "
        f"(--startup_timeout_secs) for {', '.join(peers)}. This process ends; a restart may succeed.\n"
    )
    command = [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(timeout_secs), str(os.getpid()), text]
    try:
        watchdog = subprocess.Popen(command, stdin=subprocess.PIPE)
    except OSError as e:
        _log.warning("No watchdog for the start of TensorFlow: %s.", e)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            watchdog.stdin.close()  # type: ignore[union-attr]
        watchdog.wait()
