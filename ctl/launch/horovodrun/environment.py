"""What each rank finds in its environment: its place, and what the options ask of the collectives.

asked_for({..., "fusion_threshold_mb": 32})     -> {"HOROVOD_FUSION_THRESHOLD": "33554432"}
"""

import os
import re
from collections.abc import Mapping

from ctl.collectives.placement import Placement
from ctl.errors import UsageError
from ctl.launch.horovodrun.options import Asked
from ctl.launch.processes import NOT_OURS

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
# Of this machine and this login; and functions of bash, whose names a shell over there may not take.
_STAYS = re.compile(
    r"BASH_FUNC_.*|OLDPWD|PWD|HOME|USER|LOGNAME|MAIL|SHELL|SHLVL|_|HOSTNAME|TMPDIR|DISPLAY|XAUTHORITY"
    r"|TERM|SSH_.*|XDG_.*|DBUS_.*|.*CUDA_VISIBLE_DEVICES|LD_PRELOAD"
)


def asked_for(asked: Asked) -> dict[str, str]:
    """The variables that say to the collectives what the options said."""
    told = {}
    for key, variable in _VARIABLES.items():
        value = asked[key]
        if value is not None:
            told[variable] = str(int(value)) if isinstance(value, bool) else str(value)
    if asked["fusion_threshold_mb"] is not None:
        told["HOROVOD_FUSION_THRESHOLD"] = str(asked["fusion_threshold_mb"] * 2**20)
    if asked["log_with_timestamp"] is not None:
        told["HOROVOD_LOG_HIDE_TIME"] = str(int(not asked["log_with_timestamp"]))
    return told


def of_place(place: Placement, hostname: str) -> dict[str, str]:
    """What scripts, and libraries that know Horovod, read to find out which rank they are."""
    return {
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(place.size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_size),
        "HOROVOD_CROSS_RANK": str(place.cross_rank),
        "HOROVOD_CROSS_SIZE": str(place.cross_size),
        "HOROVOD_HOSTNAME": hostname,
    }


def of_gpu(local_rank: int, *, is_here: bool, environ: Mapping[str, str] = os.environ) -> str:
    """The CUDA_VISIBLE_DEVICES of one rank: one of ours, where the rank is on this machine.

    Raises UsageError when there are more ranks than GPUs to be seen.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if not is_here or not listed:
        return str(local_rank)
    gpus = [gpu.strip() for gpu in listed.split(",")]
    if local_rank >= len(gpus):
        raise UsageError(
            f"--bind_gpus needs a GPU for local rank {local_rank}, but CUDA_VISIBLE_DEVICES={listed} has "
            f"{len(gpus)}; start at most {len(gpus)} processes here, or leave --bind_gpus out"
        )
    return gpus[local_rank]


def for_far_hosts(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Our environment as far as it means something on another machine."""
    return {
        name: value
        for name, value in environ.items()
        if not _STAYS.fullmatch(name) and name not in NOT_OURS and not name.startswith("CTL_")
    }
