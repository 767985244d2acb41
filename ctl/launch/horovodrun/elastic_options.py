"""What the elastic options of `ctlrun` ask for, checked."""

import os
import shutil

from ctl.errors import UsageError
from ctl.io.console import quoted
from ctl.launch.horovodrun.elastic import Driver, Finder
from ctl.launch.horovodrun.host_allocation import hosts_of, refuse_far
from ctl.launch.horovodrun.host_poller import Lookout, Named
from ctl.launch.horovodrun.jobs import Job
from ctl.launch.horovodrun.machines import Machines
from ctl.launch.horovodrun.membership import Limits
from ctl.launch.horovodrun.options import Asked
from ctl.launch.hosts import Host
from ctl.launch.layout import LOOPBACK

_TIMEOUT_SECS = 600


def is_asked(asked: Asked) -> bool:
    """True for a job whose processes may come and go; UsageError for options that need it."""
    if asked["host_discovery_script"] or asked["min_num_proc"]:
        return True
    for key, name in (
        ("max_num_proc", "--max-np"), ("reset_limit", "--reset-limit"), ("slots", "--slots-per-host"),
        ("cooldown", "--blacklist-cooldown-range"),
    ):  # fmt: skip
        if asked[key] is not None:
            raise UsageError(
                f"{name} is for elastic jobs; add --host-discovery-script FILE or --min-np N, or leave "
                f"{name} out"
            )
    return False


def driver_of(asked: Asked, job: Job, *, is_near: bool = False) -> Driver:
    """The driver of an elastic job. Raises UsageError for numbers that exclude each other.

    Args:
      is_near: on this machine only, whatever a script may name.
    """
    limits, cooldown = limits_of(asked), asked["cooldown"]
    if cooldown and cooldown[0] > cooldown[1]:
        raise UsageError(
            f"--blacklist-cooldown-range {cooldown[0]} {cooldown[1]} begins after its end; expected the "
            "shorter time first"
        )
    finder = _finder(asked, limits)
    if is_near and isinstance(finder, Named):
        refuse_far(host.target for host in finder.hosts if not host.is_local)
    is_alone = isinstance(finder, Named) and all(host.is_local for host in finder.hosts)
    return Driver(
        job, limits, Machines(cooldown), finder, nics=asked["nics"],
        listens_at=LOOPBACK if is_alone and not asked["nics"] else "0.0.0.0",
    )  # fmt: skip


def limits_of(asked: Asked) -> Limits:
    """How many processes; -np is at least --min-np and at most --max-np."""
    first, most = asked["num_proc"], asked["max_num_proc"]
    least = asked["min_num_proc"] or first
    if least is None:
        raise UsageError(
            "-np is missing: expected how many processes the job begins with, as in -np 2"
        )
    first = least if first is None else first
    for low, high, names in (
        (least, first, "--min-np {} is more than -np {}"),
        (first, most, "-np {} is more than --max-np {}"),
    ):
        if high is not None and low > high:
            raise UsageError(names.format(low, high) + "; expected --min-np <= -np <= --max-np")
    return Limits(
        first=first, least=least, most=most, timeout_secs=_timeout_secs(asked),
        resets=asked["reset_limit"],
    )  # fmt: skip


def _timeout_secs(asked: Asked) -> float:
    text = asked["elastic_timeout"] or os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or _TIMEOUT_SECS
    if not str(text).isdigit():
        raise UsageError(f"HOROVOD_ELASTIC_TIMEOUT is {quoted(str(text))}; expected whole seconds")
    return float(text)


def _finder(asked: Asked, limits: Limits) -> Finder:
    hosts, script = hosts_of(asked), asked["host_discovery_script"]
    if script is None:
        hosts = hosts or [Host("localhost", limits.most or limits.first)]
        slots = sum(host.slots for host in hosts)
        if slots < limits.first:
            raise UsageError(
                f"-np {limits.first} is more than the {slots} slots of the hosts; ask for {slots} at most"
            )
        return Named(hosts)
    if hosts is not None:
        raise UsageError(
            "-H or --hostfile came with --host-discovery-script; the script names the hosts, so leave "
            "them out"
        )
    found = shutil.which(script)
    if found is None:
        raise UsageError(
            f"--host-discovery-script {quoted(script)} cannot be run; expected the path of an executable "
            "file that prints a line `host:slots` for each host"
        )
    return Lookout(found, asked["slots"] or 1)
