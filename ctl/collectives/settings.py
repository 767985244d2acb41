"""Settings of the collectives runtime, read from environment variables (seconds or bytes)."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ctl.collectives.control_tree import FANOUT
from ctl.errors import UsageError

PLANE_VARIABLE = "CTL_COLLECTIVES"
_ORDER_VARIABLE = "CTL_HVD_ORDER_TIMEOUT_SECS"
_FANOUT_VARIABLE = "CTL_COLLECTIVE_FANOUT"
# The launcher copies them to all ranks
EQUAL_VARIABLES = (PLANE_VARIABLE, _ORDER_VARIABLE, _FANOUT_VARIABLE)
_PLANES = ("auto", "tcp", "mpi", "tensorflow")
_ALGORITHM_VARIABLE = "CTL_COLLECTIVE_ALGORITHM"
COLLECTIVE_ALGORITHMS = ("auto", "ring", "doubling", "halving", "machines")
_AGREEMENT_VARIABLE = "CTL_COLLECTIVE_AGREEMENT"
_AGREEMENTS = ("once", "each_call")


@dataclass(frozen=True)
class Settings:
    """Timeouts (seconds), fusion and data plane of the runtime.

    Attributes:
      start_timeout: Time limit for the connection of all ranks.
      stall_warning: Age of an incomplete collective at which it is logged; 0 disables the warning.
      stall_shutdown: Age of an incomplete collective at which it fails; 0 disables the limit.
      stall_name: Name of the setting of `stall_shutdown`, for errors.
      order_timeout: Time limit for ranks that wait in different collectives; 0 disables the check.
      heartbeat_timeout: Time without any message after which a rank is lost; 0 disables heartbeats.
      transport: Links between ranks, a name of `transports.registry`. "memory": shared memory between ranks
        of one machine, otherwise sockets.
      plane: Collectives that TensorFlow executes: "tensorflow": all, "auto": those on GPUs, "tcp"
        and "mpi": none.
      algorithm: Algorithm of large collectives on all ranks. Only the setting of rank 0 has an effect. Only
        all-reduces distinguish "doubling", "halving" and "machines".
      agrees_once: If True, the ranks agree once on a repeated sequence of all-reduces. Only the setting of
        rank 0 has an effect.
      fanout: Maximum number of ranks that send their requests to one rank, equal on all ranks.
      fusion_threshold: Maximum size of a fused message (bytes).
      cycle: Delay of small requests of a function, to fuse them.
      secret: Secret that the ranks of one job share.
      timeline: Path of a Chrome trace, or "".
      mark_cycles: If True, the trace contains the cycles of the coordinator.
    """

    start_timeout: float = 300.0
    stall_warning: float = 60.0
    stall_shutdown: float = 0.0
    stall_name: str = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    order_timeout: float = 5.0
    heartbeat_timeout: float = 0.0
    transport: str = "memory"
    plane: str = "auto"
    algorithm: str = "auto"
    agrees_once: bool = True
    fanout: int = FANOUT
    fusion_threshold: int = 128 << 20
    cycle: float = 0.001
    secret: bytes = b""
    timeline: str = ""
    mark_cycles: bool = False


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Reads the settings from environment variables. Raises UsageError for an invalid value."""
    stall = _read_number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", Settings.stall_warning)
    plane = _read_choice(environ, PLANE_VARIABLE, _PLANES)
    return Settings(
        start_timeout=_read_number(environ, "HOROVOD_START_TIMEOUT", Settings.start_timeout),
        stall_warning=0.0 if _is_set(environ, "HOROVOD_STALL_CHECK_DISABLE") else stall,
        stall_shutdown=_read_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        order_timeout=_read_number(environ, _ORDER_VARIABLE, Settings.order_timeout),
        transport=plane if plane in ("tcp", "mpi") else Settings.transport,
        plane=plane,
        algorithm=_read_choice(environ, _ALGORITHM_VARIABLE, COLLECTIVE_ALGORITHMS),
        agrees_once=_read_choice(environ, _AGREEMENT_VARIABLE, _AGREEMENTS) == "once",
        fanout=_read_count(environ, _FANOUT_VARIABLE, FANOUT),
        fusion_threshold=int(_read_number(environ, "HOROVOD_FUSION_THRESHOLD", Settings.fusion_threshold)),
        cycle=_read_number(environ, "HOROVOD_CYCLE_TIME", 1000 * Settings.cycle) / 1000,
        secret=environ.get("CTL_HVD_SECRET", "").encode(),
        timeline=environ.get("HOROVOD_TIMELINE", ""),
        mark_cycles=_is_set(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
    )


def _read_choice(environ: Mapping[str, str], name: str, choices: Sequence[str]) -> str:
    """Returns one of the choices, the first one by default. Raises UsageError for another value."""
    value = environ.get(name, "").strip() or choices[0]
    if value not in choices:
        raise UsageError(f"{name} is {value!r}; expected one of {', '.join(choices)}.")
    return value


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in ("", "0", "false")


def _read_count(environ: Mapping[str, str], name: str, default: int) -> int:
    """Returns a whole number from 1 on. Raises UsageError for another value."""
    text = environ.get(name, "").strip()
    if text and not (text.isascii() and text.isdigit() and int(text)):
        raise UsageError(f"{name} is {text!r}; expected a whole number >= 1.")
    return int(text or default)


def _read_number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(f"{name} is {text!r}; expected a number >= 0.")
    return number
