"""Elastic jobs of `ctl launch --workers=MIN:MAX`, on this machine.

    exit_code = run_elastic_workers(["python", "train.py"], options, settings, Path("logs"))

`ElasticJob` observes the workers and assigns their ranks, as in elastic jobs of `ctlrun`. The programs read
the limits from CTL_ELASTIC; see `ctl.elastic`.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from ctl.distribute.topology import Topology
from ctl.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_RETRY, UsageError
from ctl.io.console import print_message
from ctl.launch.discovery import FixedHosts
from ctl.launch.elastic import ElasticJob
from ctl.launch.elastic_restarts import WorkerPolicy
from ctl.launch.hosts import LOOPBACK, Host
from ctl.launch.log_files import LogSizeLimit
from ctl.launch.membership import HostHealth, Limits
from ctl.launch.output import RankOutput
from ctl.launch.rank_job import RankJob
from ctl.launch.supervisor import JobSettings
from ctl.setting_values import WORKER_RANGE_VARIABLE, WorkerRange

_COOLDOWN_SECS = 0.5, 5.0  # before a lost worker is replaced
_OTHER_ROLES = ("chief", "ps", "evaluator", "host", "hosts", "host_discovery", "min_workers", "max_workers")


def run_elastic_workers(
    command: Sequence[str], options: argparse.Namespace, settings: JobSettings, log_dir: Path
) -> int:
    """Runs an elastic job until it has ended. Returns its exit code.

    Args:
      command: Program and arguments.
      options: Options of `ctl launch`.
      settings: Timeouts of the job.
      log_dir: Directory of the logs: rank.0/stdout, rank.0/stderr, rank.1/stdout, ...

    Raises:
      UsageError: For options that an elastic job does not support.
    """
    limits: WorkerRange = options.workers
    text = f"{limits.minimum}:{limits.maximum}"
    for name in _OTHER_ROLES:
        if getattr(options, name):
            raise UsageError(
                f"--{name} cannot be combined with --workers={text}: an elastic job of `ctl launch` has "
                f"only workers, on this machine. Omit --{name}, or specify one number of workers"
            )
    if options.hang_timeout_secs:
        raise UsageError(
            f"--hang_timeout_secs={options.hang_timeout_secs:g} cannot be combined with --workers={text}: "
            "the launcher cannot see for which worker the others wait. Omit it, and set "
            "--collective_timeout_secs of the program"
        )
    job = RankJob(
        command=command,
        output=_WorkerOutput(log_dir, limits.maximum, settings.max_log_bytes),
        environ={WORKER_RANGE_VARIABLE: text},
        heartbeat_timeout_secs=settings.timeouts.heartbeat,
        grace_secs=settings.grace_secs,
        sets_ranks=False,
    )
    elastic_job = ElasticJob(
        job,
        Limits(
            initial=limits.maximum,
            minimum=limits.minimum,
            maximum=limits.maximum,
            timeout_secs=options.elastic_timeout_secs,
            start_timeout_secs=settings.timeouts.startup or math.inf,
        ),
        HostHealth(_COOLDOWN_SECS),
        FixedHosts([Host("localhost", limits.maximum)]),
        listens_at=LOOPBACK,
        policy=WorkerPolicy(settings.policy, settings.model_dir),
        report=print_message,
    )
    exit_code = elastic_job.run()
    is_stopped = exit_code in (EXIT_INTERRUPTED, EXIT_PREEMPTED)
    return EXIT_RETRY if elastic_job.lacks_workers and not is_stopped else exit_code


class _WorkerOutput(RankOutput):
    """Output of workers on the console, and in files with a size limit."""

    def __init__(self, log_dir: Path, count: int, max_bytes: int):
        super().__init__(directory=str(log_dir), count=count)
        self._log_dir, self._limit = log_dir, LogSizeLimit(max_bytes)

    def limit_logs(self, tasks: Iterable[Topology]) -> None:
        self._limit.apply(self._log_dir.glob("rank.*/std*"))
