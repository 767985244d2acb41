"""Environment of the ranks of `ctlrun`: rank variables and settings of the collectives.

option_environ({..., "fusion_threshold_mb": 32})     -> {"HOROVOD_FUSION_THRESHOLD": "33554432"}
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctl.collectives.ranks import Ranks
from ctl.errors import UsageError
from ctl.launch.process import JOB_VARIABLES

_VARIABLES = {
    "cycle_time_ms": "HOROVOD_CYCLE_TIME", "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "timeline_filename": "HOROVOD_TIMELINE",
    "timeline_mark_cycles": "HOROVOD_TIMELINE_MARK_CYCLES",
    "no_stall_check": "HOROVOD_STALL_CHECK_DISABLE",
    "stall_warning_secs": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_shutdown_secs": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "log_level": "HOROVOD_LOG_LEVEL", "start_timeout": "HOROVOD_START_TIMEOUT",
    "elastic_timeout": "HOROVOD_ELASTIC_TIMEOUT", "nics": "NCCL_SOCKET_IFNAME",
}  # fmt: skip
# Variables of this machine and login, and functions of bash: other shells may reject their names.
_LOCAL_VARIABLES = re.compile(
    r"BASH_FUNC_.*|OLDPWD|PWD|HOME|USER|LOGNAME|MAIL|SHELL|SHLVL|_|HOSTNAME|TMPDIR|DISPLAY|XAUTHORITY"
    r"|TERM|SSH_.*|XDG_.*|DBUS_.*|.*CUDA_VISIBLE_DEVICES|LD_PRELOAD"
)
# packages named horovod and perseus
SHIM_FOLDER = str(Path(__file__).resolve().parent.parent / "hvd" / "shims")


def horovod_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables with which a program imports `ctl.hvd` as `horovod` and `perseus`."""
    paths = [SHIM_FOLDER, *filter(None, [environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def option_environ(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables that pass options of `ctlrun` to the collectives."""
    environ = {}
    for key, variable in _VARIABLES.items():
        value = options[key]
        if value is not None:
            environ[variable] = str(int(value)) if isinstance(value, bool) else str(value)
    if options["fusion_threshold_mb"] is not None:
        environ["HOROVOD_FUSION_THRESHOLD"] = str(options["fusion_threshold_mb"] * 2**20)
    if options["log_with_timestamp"] is not None:
        environ["HOROVOD_LOG_HIDE_TIME"] = str(int(not options["log_with_timestamp"]))
    return environ


def rank_environ(rank_info: Ranks, hostname: str) -> dict[str, str]:
    """Returns the variables from which scripts and Horovod's libraries read their rank."""
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    environ = {f"HOROVOD_{name.upper()}": str(getattr(rank_info, name)) for name in names}
    return {**environ, "HOROVOD_HOSTNAME": hostname}


def visible_gpu(local_rank: int, *, is_here: bool, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the CUDA_VISIBLE_DEVICES of a rank: one of the launcher's GPUs if it is on this machine.

    Raises UsageError if there are more ranks than visible GPUs.
    """
    visible_gpus = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if not is_here or not visible_gpus:
        return str(local_rank)
    gpus = [gpu.strip() for gpu in visible_gpus.split(",")]
    if local_rank >= len(gpus):
        raise UsageError(
            f"--bind_gpus requires a GPU for local rank {local_rank}, but "
            f"CUDA_VISIBLE_DEVICES={visible_gpus} has "
            f"{len(gpus)}; start at most {len(gpus)} processes on this machine, or omit --bind_gpus"
        )
    return gpus[local_rank]


def remote_job_environ(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the launcher's environment without variables that concern this machine only."""
    return {
        name: value
        for name, value in environ.items()
        if not _LOCAL_VARIABLES.fullmatch(name)
        and name not in JOB_VARIABLES
        and not name.startswith("CTL_")
    }
