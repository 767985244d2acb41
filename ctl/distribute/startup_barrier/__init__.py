"""Barrier of the workers before TensorFlow connects them.

    with startup_barrier.checked(cluster, facts, timeout_secs=600.0):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()

TensorFlow's constructor waits without a timeout and without log messages, and holds the interpreter's
lock. Therefore the workers first connect to the chief's own address. Each worker sends its rank and the
fingerprint of its process. The chief logs the missing workers and then releases all of them. If the
launcher has set a secret, both sides authenticate with it (`ctl.io.authenticated_channel`). A small
subprocess supervises the constructor. Pure Python.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ctl.distribute.job_fingerprint import shown
from ctl.distribute.startup_barrier import watchdog, worker
from ctl.distribute.startup_barrier.chief import Chief
from ctl.distribute.topology import Topology

STARTUP_TIMEOUT_SECS = 600.0
STARTUP_TIMEOUT_VARIABLE = "CTL_STARTUP_TIMEOUT_SECS"
_met = False  # in this process


def timeout_of(asked: float | None) -> float:
    """Returns the timeout for peers (seconds): the argument, else the launcher's value, else 600."""
    if asked is not None:
        return asked
    try:
        return max(0.0, float(os.environ.get(STARTUP_TIMEOUT_VARIABLE, ""))) or STARTUP_TIMEOUT_SECS
    except ValueError:
        return STARTUP_TIMEOUT_SECS


@contextlib.contextmanager
def checked(cluster: Topology, facts: Mapping[str, Any], timeout_secs: float) -> Iterator[None]:
    """Waits for all workers, compares `facts` and limits the duration of the block. Runs once per process.

    Raises PeerLostError if a worker does not connect in time, UsageError if one differs from the chief.
    """
    global _met  # noqa: PLW0603  TensorFlow's own server takes the port for good
    if _met or cluster.num_workers < 2:
        yield
        return
    _met = True
    meet_workers(cluster, facts, timeout_secs)
    with watchdog.limited(cluster, timeout_secs):
        yield


def meet_workers(cluster: Topology, facts: Mapping[str, Any], timeout_secs: float) -> None:
    """Runs the barrier without the limit for the block; see `checked`."""
    mine = {k: str(shown(k, v)) for k, v in facts.items()}
    mine["TF_CONFIG's cluster"] = json.dumps({k: list(v) for k, v in cluster.tasks.items()})
    if cluster.is_chief:
        Chief(cluster, mine, timeout_secs).run()
    else:
        worker.visit(cluster, mine, timeout_secs)
