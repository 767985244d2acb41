"""The `ctl launch` command: reads the line, checks it, and hands it to the supervisor."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ctl.errors import EXIT_DONE, UsageError
from ctl.io.console import quoted, say
from ctl.launch import hosts, log_files, options
from ctl.launch.heartbeats import Timeouts
from ctl.launch.layout import LOOPBACK, Discovered, Fixed, Layout, OnHosts, Roles
from ctl.launch.progress import local_model_dir, value_of
from ctl.launch.supervisor import Settings, launch
from ctl.supervision import lease


def main(argv: Sequence[str]) -> int:
    """Runs `ctl launch` with the words after "launch" and returns its exit code.

    What cannot be used is one sentence on stderr and exit code 2.
    """
    try:
        asked, command = options.read(list(argv))
        if asked is None:
            return EXIT_DONE
        layout = _layout(asked)
        _check_command(command)
        _claim(command)
        log_dir = _log_dir(asked.log_dir, command)
        if os.environ.get("TF_CONFIG"):
            say("TF_CONFIG was set already; each worker gets a new one instead")
        if asked.ps and not asked.chief:
            say("parameter servers need a coordinator: a chief is started as well (--chief)")
        with log_files.owned(log_dir):
            return launch(
                command, layout=layout, log_dir=log_dir, settings=_settings(asked, command)
            )
    except UsageError as e:
        say(str(e))
        return e.exit_code


def _settings(asked: argparse.Namespace, command: list[str]) -> Settings:
    return Settings(
        grace_secs=asked.grace_secs,
        max_restarts=asked.max_restarts,
        backoff_secs=asked.backoff_secs,
        restart_on_error=asked.restart_on_error,
        timeouts=Timeouts(
            heartbeat=asked.heartbeat_timeout_secs,
            hang=asked.hang_timeout_secs,
            startup=asked.startup_timeout_secs,
        ),
        model_dir=local_model_dir(command),
        most_log_bytes=int(asked.max_log_mib * 2**20),
    )


def _layout(asked: argparse.Namespace) -> Layout:
    """Where the workers go; UsageError for options that exclude each other."""
    if asked.host is not None:
        _check_host(asked.host)
    if asked.hosts is None and asked.host_discovery is None:
        _refuse_elastic(asked)
        roles = Roles(
            workers=1 if asked.workers is None else asked.workers,
            chief=asked.chief or asked.ps > 0,
            ps=asked.ps,
            evaluator=asked.evaluator,
        )
        return Fixed(roles, LOOPBACK if asked.host is None else asked.host)
    word = "-H" if asked.host_discovery is None else "--host_discovery"
    given = {
        "--workers": asked.workers is not None, "--chief": asked.chief, "--ps": asked.ps > 0,
        "--evaluator": asked.evaluator,
    }  # fmt: skip
    for option, is_given in given.items():
        if is_given:
            cure = (
                "the slots of the hosts say how many workers there are"
                if option == "--workers"
                else "on several machines there are workers only"
            )
            raise UsageError(f"{option} came with {word}; {cure}, so leave {option} out")
    if asked.host_discovery is None:
        _refuse_elastic(asked)
        return OnHosts(hosts.read(asked.hosts), port=asked.port, own_address=asked.host)
    if asked.hosts is not None:
        raise UsageError(
            "-H came with --host_discovery; the script names the hosts, so leave -H out"
        )
    return _discovered(asked)


def _discovered(asked: argparse.Namespace) -> Layout:
    least = 1 if asked.min_workers is None else asked.min_workers
    if asked.max_workers is not None and asked.max_workers < least:
        raise UsageError(
            f"--min_workers={least} is more than --max_workers={asked.max_workers}; expected at most "
            "as many"
        )
    script = shutil.which(asked.host_discovery)
    if script is None:
        raise UsageError(
            f"--host_discovery={quoted(asked.host_discovery)} cannot be run; expected the path of an "
            "executable file that prints a line `host:slots` for each host"
        )
    return Discovered(
        script, least=least, most=asked.max_workers, port=asked.port, own_address=asked.host
    )


def _refuse_elastic(asked: argparse.Namespace) -> None:
    for option, value in (
        ("--min_workers", asked.min_workers),
        ("--max_workers", asked.max_workers),
    ):
        if value is not None:
            raise UsageError(
                f"{option}={value} needs --host_discovery=SCRIPT, which says how many workers there is "
                "room for; without one the number is that of --workers or -H"
            )


def _check_host(host: str) -> None:
    try:
        found = hosts.read_one(host)
    except UsageError:
        found = None
    if found is None or ":" in host or "@" in host:
        raise UsageError(
            f"--host={quoted(host)} is no address; expected an IPv4 address of this machine, or its name. "
            f"Write --host={LOOPBACK}."
        )


def _claim(command: list[str]) -> None:
    """Raises UsageError while another job trains in the command's model_dir: its logs are there, too."""
    model_dir = local_model_dir(command)
    trains = value_of("mode", command) not in ("eval", "export", "predict")
    if model_dir is not None and trains:
        lease.claim(str(model_dir))


def _check_command(command: list[str]) -> None:
    program = command[0]
    if shutil.which(program) is None:
        where = "cannot be run" if os.path.exists(program) else "was not found"
        raise UsageError(
            f"the command {program!r} {where}; expected a program on PATH or the path of an "
            "executable file. A script runs with `-- python script.py`"
        )


def _log_dir(asked: str | None, command: list[str]) -> Path:
    """Creates the directory for the logs if need be; UsageError when it cannot be written."""
    model_dir = local_model_dir(command)
    if asked:
        log_dir = Path(asked)
    elif model_dir is not None:
        log_dir = model_dir / "workers"
    else:
        return Path(tempfile.mkdtemp(prefix="ctl-launch-"))
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        (log_dir / "job_0.log").open("ab").close()
    except OSError as e:
        raise UsageError(
            f"logs cannot be written to {str(log_dir)!r} ({e.strerror}); give a directory that "
            "can be written with --log_dir=DIR"
        ) from None
    return log_dir
