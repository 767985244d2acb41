"""Before TensorFlow waits for its peers: are they all there, and are they alike?

    with startup_barrier.checked(cluster, facts, timeout_secs=600.0):
        strategy = tf.distribute.MultiWorkerMirroredStrategy()

TensorFlow's constructor waits for ever, without a word, and holds the interpreter's lock. So the
workers meet before, at the chief's own address: each says who it is and what it was started with,
the chief names those that are missing, and lets all go on together. Both sides prove first that they
know the launcher's secret, if there is one (`ctl.io.authenticated_channel`). A small process of its own
looks after the constructor. Pure Python.
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
    """Seconds to wait for peers: what was asked for, else the launcher's wish, else ten minutes."""
    if asked is not None:
        return asked
    try:
        return max(0.0, float(os.environ.get(STARTUP_TIMEOUT_VARIABLE, ""))) or STARTUP_TIMEOUT_SECS
    except ValueError:
        return STARTUP_TIMEOUT_SECS


@contextlib.contextmanager
def checked(cluster: Topology, facts: Mapping[str, Any], timeout_secs: float) -> Iterator[None]:
    """Waits for all workers, compares `facts`, and limits the time of the block, for this process once.

    Raises PeerLostError when one does not come in time, UsageError when one differs from the chief.
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
    """The meeting alone; see `checked`."""
    mine = {k: str(shown(k, v)) for k, v in facts.items()}
    mine["TF_CONFIG's cluster"] = json.dumps({k: list(v) for k, v in cluster.tasks.items()})
    if cluster.is_chief:
        Chief(cluster, mine, timeout_secs).run()
    else:
        worker.visit(cluster, mine, timeout_secs)
