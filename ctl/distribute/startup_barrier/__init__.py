"""Barrier of the workers before TensorFlow connects them.

    with startup_barrier.wait_for_workers(cluster, facts, timeout_secs=600.0):
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
_has_run = False  # in this process


def timeout_of(timeout_secs: float | None) -> float:
    """Returns the timeout for peers (seconds): the argument, else the launcher's value, else 600."""
    if timeout_secs is not None:
        return timeout_secs
    try:
        return max(0.0, float(os.environ.get(STARTUP_TIMEOUT_VARIABLE, ""))) or STARTUP_TIMEOUT_SECS
    except ValueError:
        return STARTUP_TIMEOUT_SECS


@contextlib.contextmanager
def wait_for_workers(cluster: Topology, facts: Mapping[str, Any], timeout_secs: float) -> Iterator[None]:
    """Waits for all workers, compares `facts` and limits the duration of the block. Runs once per process.

    Raises PeerLostError if a worker does not connect in time, UsageError if one differs from the chief.
    """
    global _has_run  # noqa: PLW0603  TensorFlow's own server takes the port for good
    if _has_run or cluster.num_workers < 2:
        yield
        return
    _has_run = True
    run_barrier(cluster, facts, timeout_secs)
    with watchdog.limited(cluster, timeout_secs):
        yield


def run_barrier(cluster: Topology, facts: Mapping[str, Any], timeout_secs: float) -> None:
    """Runs the barrier without the limit for the block; see `wait_for_workers`."""
    text_by_fact = {k: str(shown(k, v)) for k, v in facts.items()}
    text_by_fact["TF_CONFIG's cluster"] = json.dumps({k: list(v) for k, v in cluster.tasks.items()})
    if cluster.is_chief:
        Chief(cluster, text_by_fact, timeout_secs).run()
    else:
        worker.wait_for_release(cluster, text_by_fact, timeout_secs)
