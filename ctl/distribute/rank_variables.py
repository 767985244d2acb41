"""Rank of this process in `ctl.collectives`, read from its environment."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ctl.collectives.ranks import Ranks, build_ranks
from ctl.distribute.platforms import detection, variables
from ctl.distribute.topology import TRAINING_TYPES
from ctl.errors import UsageError

_COUNTS = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def read_ranks(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Returns the ranks from TF_CONFIG, as `platforms.detection` reads it.

    HOROVOD_LOCAL_RANK and similar variables have priority. Without TF_CONFIG the job is this process only.
    Raises UsageError if TF_CONFIG and the variables contradict each other, or if HOROVOD_SIZE is greater
    than 1 and no variable lists the addresses of the peers.
    """
    topology = detection.read_topology(environ)
    if topology.task_type not in TRAINING_TYPES:
        raise UsageError(
            f"TF_CONFIG's task is {topology.task_type} {topology.task_index}; expected a chief or a "
            "worker, because all ranks of ctl.hvd train."
        )
    ranks = build_ranks(topology.workers, topology.worker_index) if topology.num_workers > 1 else Ranks()
    for name, expected in (("RANK", ranks.rank), ("SIZE", ranks.size)):
        came = variables.number(environ, f"HOROVOD_{name}")
        if came is not None and came != expected:
            raise UsageError(
                f"HOROVOD_{name} is {came}, but TF_CONFIG defines {expected}; ctl.hvd uses TF_CONFIG "
                "to connect. Start the script with `ctlrun -np N` or `ctl launch --workers=N`."
            )
    counts: dict[str, Any] = {n.lower(): variables.number(environ, f"HOROVOD_{n}") for n in _COUNTS}
    return replace(ranks, **{name: count for name, count in counts.items() if count is not None})
