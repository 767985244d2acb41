"""Ends this process if TensorFlow's start takes too long: nothing in it may run meanwhile."""

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
    """Ends this process with SIGABRT (exit code 134) if the block takes too long.

    Another process does it: within the block Python may not run at all.
    """
    others = [name_of(cluster, r) for r in range(cluster.num_workers) if r != cluster.worker_index]
    text = (
        f"ctl: all workers had answered, but for {timeout_secs:g} s (--startup_timeout_secs) TensorFlow "
        f"has waited for {', '.join(others)}. This process is ended; it is worth another attempt.\n"
    )
    words = [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(timeout_secs), str(os.getpid()), text]
    try:
        watchdog = subprocess.Popen(words, stdin=subprocess.PIPE)
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
