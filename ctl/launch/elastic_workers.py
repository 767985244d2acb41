"""Elastic jobs of `ctl launch --workers=MIN:MAX`, on this machine or on several ones.

    exit_code = run_elastic_workers(["python", "train.py"], options, settings, Path("logs"))

`ElasticJob` observes the workers and assigns their ranks, as in elastic jobs of `ctlrun`. The programs read
the limits from CTL_ELASTIC; see `ctl.elastic`.
"""

import argparse
import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from ctl.distribute.topology import Topology
from ctl.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_RETRY, UsageError
from ctl.io.console import print_message
from ctl.launch.discovery import FixedHosts, HostPoller, HostSource, find_script
from ctl.launch.elastic import ElasticJob
from ctl.launch.elastic_restarts import WorkerPolicy
from ctl.launch.host_health import HostHealth
from ctl.launch.hosts import LOOPBACK, Host, format_hosts, parse_hosts, resolve_addresses
from ctl.launch.log_files import LogSizeLimit
from ctl.launch.membership import Limits
from ctl.launch.output import RankOutput
from ctl.launch.rank_job import RankJob
from ctl.launch.supervisor import JobSettings
from ctl.setting_values import WORKER_RANGE_VARIABLE, WorkerRange
from ctl.supervision import lease

_COOLDOWN_SECS = 0.5, 5.0  # before a lost worker is replaced
_FIRST_GROUP_SECS = 30.0  # for further workers to start once MIN are waiting, because machines differ
_REFUSED = {  # options of other jobs, with the reason
    "chief": "an elastic job has only workers",
    "ps": "an elastic job has only workers",
    "evaluator": "an elastic job has only workers",
    "min_workers": "the range gives the smallest number of workers",
    "max_workers": "the range gives the largest number of workers",
    "port": "the workers of an elastic job listen at free ports",
}


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
    worker_range: WorkerRange = options.workers
    limits = _limits_of_job(options, settings)
    source = _host_source(options)
    is_alone = bool(source.hosts) and all(host.is_local for host in source.hosts)
    resolve = functools.partial(
        resolve_addresses, own_address=options.host, option=", or add --host=ADDRESS"
    )
    if source.hosts and not is_alone:
        resolve([Host("localhost"), *source.hosts])  # an error now, not at each start of a worker
    dead_holders = lease.dead_holders()
    job = RankJob(
        command=command,
        output=_WorkerOutput(log_dir, worker_range.maximum, settings.max_log_bytes),
        environ={
            WORKER_RANGE_VARIABLE: _text_of(worker_range),
            **({lease.DEAD_HOLDERS: dead_holders} if dead_holders else {}),
        },
        heartbeat_timeout_secs=settings.timeouts.heartbeat,
        grace_secs=settings.grace_secs,
        sets_ranks=False,
    )
    elastic_job = ElasticJob(
        job,
        limits,
        HostHealth(_COOLDOWN_SECS),
        source,
        resolve=resolve,
        listens_at=LOOPBACK if is_alone and options.host is None else "0.0.0.0",
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


def check_elastic_options(options: argparse.Namespace) -> None:
    """Raises UsageError for options of `ctl launch` that an elastic job does not support."""
    text = _text_of(options.workers)
    if options.hang_timeout_secs:
        raise UsageError(
            f"--hang_timeout_secs={options.hang_timeout_secs:g} cannot be combined with --workers={text}: "
            "the launcher cannot see for which worker the others wait. Omit it, and set "
            "--collective_timeout_secs of the program"
        )
    for name, reason in _REFUSED.items():
        if getattr(options, name):
            raise UsageError(
                f"--{name} cannot be combined with --workers={text}: {reason}. Omit --{name}, or specify "
                "one number of workers"
            )
    has_hosts, has_script = options.hosts is not None, options.host_discovery is not None
    if has_hosts and has_script:
        raise UsageError("-H cannot be combined with --host_discovery: the script lists the hosts. Omit -H")
    if options.host is not None and not (has_hosts or has_script):
        raise UsageError(
            f"--host={options.host} cannot be combined with --workers={text} on one machine, whose workers "
            f"use {LOOPBACK}; add -H or --host_discovery, or omit --host"
        )
    if has_hosts:
        hosts, minimum = parse_hosts(options.hosts), options.workers.minimum
        num_slots = sum(host.slots for host in hosts)
        if num_slots < minimum:
            raise UsageError(
                f"-H {format_hosts(hosts)} has {num_slots} slot{'s' if num_slots > 1 else ''}; expected at "
                f"least {minimum}, the minimum of --workers={text}. Add hosts or slots, or decrease the "
                "minimum"
            )


def _limits_of_job(options: argparse.Namespace, settings: JobSettings) -> Limits:
    """Returns the limits. On several machines the job also starts if some of them are not available."""
    worker_range, has_hosts = options.workers, bool(options.hosts or options.host_discovery)
    return Limits(
        initial=worker_range.minimum if has_hosts else worker_range.maximum,
        minimum=worker_range.minimum,
        maximum=worker_range.maximum,
        timeout_secs=options.elastic_timeout_secs,
        start_timeout_secs=settings.timeouts.startup or math.inf,
        first_group_secs=_FIRST_GROUP_SECS,
        counts_leaving=True,
        timeout_name="--elastic_timeout_secs",
    )


def _host_source(options: argparse.Namespace) -> HostSource:
    if options.host_discovery is not None:
        script = find_script(options.host_discovery, "--host_discovery=")
        return HostPoller(script, option="--host_discovery")
    if options.hosts is not None:
        return FixedHosts(parse_hosts(options.hosts))
    return FixedHosts([Host("localhost", options.workers.maximum)])


def _text_of(limits: WorkerRange) -> str:
    return f"{limits.minimum}:{limits.maximum}"
