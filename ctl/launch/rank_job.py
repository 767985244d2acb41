"""Jobs of `ctlrun`: command and environment of the ranks, and jobs of a fixed number of ranks.

exit_code = run_ranks(job, allocate_ranks(None, 2))       # the first failure ends all ranks
"""

import contextlib
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ctl.collectives import ranks
from ctl.collectives.ranks import Ranks
from ctl.distribute.topology import Topology
from ctl.errors import EXIT_DONE
from ctl.launch.heartbeat_monitor import HeartbeatMonitor, Timeouts
from ctl.launch.horovodrun_options import report
from ctl.launch.host_allocation import Placement
from ctl.launch.hosts import Host
from ctl.launch.monitor import ForwardedSignals, Monitor, Outcome
from ctl.launch.output import RankOutput
from ctl.launch.process import ProcessExit
from ctl.launch.process_group import ProcessGroup
from ctl.launch.rank_environment import rank_environ, visible_gpu
from ctl.launch.ssh import SshOptions

FAILURE_GRACE_SECS = 10.0  # from SIGTERM to SIGKILL after a failure: the remaining ranks have lost a peer


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """A command, and the environment of its processes.

    Attributes:
      command: Program and arguments.
      output: Output of the ranks.
      environ: Variables of the collectives.
      remote_environ: Further variables of processes on other machines.
      ssh_options: Options of ssh.
      binds_gpus: If True, each rank can access only the GPU of its local rank.
      is_verbose: If True, reports each start.
      heartbeat_timeout_secs: Silence after which a rank counts as hung (seconds). 0 disables it.
      grace_secs: Time from a forwarded signal to SIGKILL (seconds).
      sets_ranks: If False, the processes do not receive HOROVOD_RANK and the other variables of ranks.
      private: Variables of the processes of this job, which never appear on a command line.
    """

    command: Sequence[str]
    output: RankOutput
    environ: Mapping[str, str] = field(default_factory=dict)
    remote_environ: Mapping[str, str] = field(default_factory=dict)
    ssh_options: SshOptions | None = None
    binds_gpus: bool = False
    is_verbose: bool = False
    heartbeat_timeout_secs: float = 60.0
    grace_secs: float = 30.0
    sets_ranks: bool = True
    private: Mapping[str, str] = field(default_factory=lambda: {"CTL_HVD_SECRET": secrets.token_hex(32)})

    def create_process_group(self) -> ProcessGroup:
        """Returns a group without processes."""
        return ProcessGroup(self.command, self.output, ssh_options=self.ssh_options)

    def create_heartbeat_monitor(self) -> HeartbeatMonitor:
        """Returns the monitor of the ranks of this machine. Other machines are not monitored."""
        timeouts = Timeouts(heartbeat=self.heartbeat_timeout_secs, startup=0.0)
        monitor = HeartbeatMonitor(None, timeouts, ranks_only=True)
        monitor.reset([])
        return monitor

    def build_environ(self, rank_info: Ranks, host: str, *, is_here: bool) -> dict[str, str]:
        """Returns the variables of one rank. Raises UsageError if there is no GPU for it."""
        environ = {**self.environ, **(rank_environ(rank_info, host) if self.sets_ranks else {})}
        if self.binds_gpus:
            environ["CUDA_VISIBLE_DEVICES"] = visible_gpu(rank_info.local_rank, is_here=is_here)
        return environ

    def start(
        self,
        group: ProcessGroup,
        heartbeats: HeartbeatMonitor,
        task: Topology,
        environ: Mapping[str, str],
        remote: str | None,
    ) -> None:
        """Starts a rank. `remote` is the target of ssh, None for this machine."""
        private = {**(self.remote_environ if remote else {}), **self.private}
        beat = {} if remote else heartbeats.environ(task)
        group.start(task, {**environ, **beat}, private=private, host=remote)


def describe_end(end: ProcessExit) -> str:
    """Returns a description of the end of a process, which follows its name."""
    return end.description or (f"was ended by {end}" if end.signal_name else f"failed: {end}")


def reports_lost_peer(last_line: str) -> bool:
    """Returns True if the last line of a traceback only reports the loss of another rank."""
    return any(name in last_line for name in ("HorovodInternalError", "LostRankError"))


def run_ranks(job: RankJob, placement: Placement) -> int:
    """Starts the ranks and waits for their ends. Returns the exit code of the first failure, or 0.

    The code is 128+n for signal n, and 130 or 143 after a SIGINT or SIGTERM to the launcher.
    """

    def is_consequence(process_exit: ProcessExit) -> bool:
        has_own_cause = bool(process_exit.signal_name or process_exit.description)
        return not has_own_cause and reports_lost_peer(job.output.last_error(process_exit.task))

    hosts = [Host(target).address for target in placement.hosts or ()]
    environs = [
        job.build_environ(ranks_of_task(placement, task), host, is_here=not placement.remote_host(task))
        for task, host in zip(placement.tasks, hosts, strict=True)
    ]
    with contextlib.closing(job.create_heartbeat_monitor()) as heartbeats, ForwardedSignals() as signals:
        group = job.create_process_group()
        try:
            for task, host, environ in zip(placement.tasks, hosts, environs, strict=True):
                if job.is_verbose:
                    report(f"rank {task.task_index} on {host}: {' '.join(job.command)}")
                job.start(group, heartbeats, task, environ, placement.remote_host(task))
            job.output.start()
            outcome = Monitor(group, 0.0, signals, heartbeats, is_consequence=is_consequence).wait()
            _end_ranks(job, group, outcome, signals)
        except BaseException:
            group.end(0.0)
            raise
    return _exit_code(group, outcome, signals)


def ranks_of_task(placement: Placement, task: Topology) -> Ranks:
    """Returns the ranks of a process. Two names of one machine count as two hosts."""
    return ranks.build_ranks([f"{target}:" for target in placement.hosts or ()], task.task_index)


def _end_ranks(job: RankJob, group: ProcessGroup, outcome: Outcome, signals: ForwardedSignals) -> None:
    cause = outcome.cause
    signum = signals.received[0] if signals.received else signal.SIGTERM
    if cause is None:
        group.end(job.grace_secs, signum, is_urgent=signals.is_repeated)
        return
    remaining_ranks = [str(t.task_index) for t in group.running if t != cause.task]
    if remaining_ranks:
        failure = f"rank {cause.task.task_index} {describe_end(cause)}"
        report(f"{failure}; terminating the remaining ranks: {', '.join(remaining_ranks)}")
    group.end(FAILURE_GRACE_SECS, signum, is_urgent=lambda: bool(signals.received))


def _exit_code(group: ProcessGroup, outcome: Outcome, signals: ForwardedSignals) -> int:
    cause = outcome.cause
    if cause:
        report(f"rank {cause.task.task_index} {describe_end(cause)} (the first failure)")
        return cause.exit_code
    if signals.received and (group.running or group.failures):
        report("stopped by " + signal.Signals(signals.received[0]).name)
        return 128 + signals.received[0]
    return EXIT_DONE
