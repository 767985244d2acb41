"""Elastic jobs of `ctl launch --workers=MIN:MAX`, on this machine.

    exit_code = run_elastic_workers(["python", "train.py"], options, settings, Path("logs"))

`ElasticJob` observes the workers and assigns their ranks, as in elastic jobs of `ctlrun`. The programs read
the limits from CTL_ELASTIC; see `ctl.elastic`.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from ctl.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_RETRY, UsageError
from ctl.io.console import print_message
from ctl.launch.discovery import FixedHosts
from ctl.launch.elastic import ElasticJob
from ctl.launch.hosts import LOOPBACK, Host
from ctl.launch.membership import HostHealth, Limits
from ctl.launch.output import RankOutput
from ctl.launch.process import ProcessExit
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
    job = RankJob(
        command=command,
        output=RankOutput(directory=str(log_dir), count=limits.maximum),
        environ={WORKER_RANGE_VARIABLE: text},
        heartbeat_timeout_secs=settings.timeouts.heartbeat,
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
        is_permanent=_is_permanent,
        report=print_message,
    )
    exit_code = elastic_job.run()
    is_stopped = exit_code in (EXIT_INTERRUPTED, EXIT_PREEMPTED)
    return EXIT_RETRY if elastic_job.lacks_workers and not is_stopped else exit_code


def _is_permanent(process_exit: ProcessExit) -> bool:
    """Returns True for an exit code of the program that a restart does not change."""
    return 0 < process_exit.returncode <= 127
