"""What HOROVOD_* variables set of the runtime; all in seconds or bytes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ctl.errors import UsageError

PLANE_VARIABLE = "CTL_COLLECTIVES"
SOCKETS_VARIABLE = "CTL_SOCKETS_PER_PEER"
_ORDER_VARIABLE = "CTL_HVD_ORDER_TIMEOUT_SECS"
EQUAL_VARIABLES = (PLANE_VARIABLE, SOCKETS_VARIABLE, _ORDER_VARIABLE)  # better so on all ranks
_MOST_SOCKETS = 16  # of one pair
_PLANES = ("auto", "tcp", "tensorflow")  # tcp: also between ranks of one machine


@dataclass(frozen=True)
class Settings:
    """How patient the ranks are with each other, and how they pack.

    Attributes:
      start_timeout: for all ranks to find each other.
      stall_warning: until a collective that some ranks have not joined is told; 0 for never.
      stall_shutdown: until it is an error; 0 for never.
      stall_name: of the setting that says so, for errors.
      order_timeout: until ranks that wait in different collectives are an error; 0 for never.
      silence: until a rank that says nothing at all is lost; 0 for never.
      shares_memory: ranks of one machine exchange large tensors through memory that both see.
      sockets: between two ranks; 0 for one within a machine, and several between machines.
      plane: which collectives are TensorFlow's: "tensorflow" all of them, "auto" those on GPUs, "tcp" none.
      fusion_threshold: bytes of tensors that travel together.
      cycle: for which small requests of a function that follow one another are held back, to go together.
      secret: known to the ranks of one job only.
      timeline: path of a Chrome trace, or "".
      mark_cycles: the trace shows when requests were looked at.
    """

    start_timeout: float = 300.0
    stall_warning: float = 60.0
    stall_shutdown: float = 0.0
    stall_name: str = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    order_timeout: float = 5.0
    silence: float = 0.0
    shares_memory: bool = True
    sockets: int = 0
    plane: str = "auto"
    fusion_threshold: int = 128 << 20
    cycle: float = 0.001
    secret: bytes = b""
    timeline: str = ""
    mark_cycles: bool = False


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Raises UsageError for what is not a number."""
    stall = _number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", Settings.stall_warning)
    return Settings(
        start_timeout=_number(environ, "HOROVOD_START_TIMEOUT", Settings.start_timeout),
        stall_warning=0.0 if _is_set(environ, "HOROVOD_STALL_CHECK_DISABLE") else stall,
        stall_shutdown=_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0),
        order_timeout=_number(environ, _ORDER_VARIABLE, Settings.order_timeout),
        shares_memory=_plane(environ) != "tcp",
        sockets=_sockets(environ),
        plane=_plane(environ),
        fusion_threshold=int(_number(environ, "HOROVOD_FUSION_THRESHOLD", Settings.fusion_threshold)),
        cycle=_number(environ, "HOROVOD_CYCLE_TIME", 1000 * Settings.cycle) / 1000,
        secret=environ.get("CTL_HVD_SECRET", "").encode(),
        timeline=environ.get("HOROVOD_TIMELINE", ""),
        mark_cycles=_is_set(environ, "HOROVOD_TIMELINE_MARK_CYCLES"),
    )


def _plane(environ: Mapping[str, str]) -> str:
    word = environ.get(PLANE_VARIABLE, "").strip() or "auto"
    if word not in _PLANES:
        raise UsageError(f"{PLANE_VARIABLE} is {word!r}; expected one of {', '.join(_PLANES)}.")
    return word


def _sockets(environ: Mapping[str, str]) -> int:
    text = environ.get(SOCKETS_VARIABLE, "").strip()
    if text and not (text.isdecimal() and 1 <= int(text) <= _MOST_SOCKETS):
        raise UsageError(
            f"{SOCKETS_VARIABLE} is {text!r}; expected a whole number from 1 to {_MOST_SOCKETS}, or "
            "nothing, for 1 within a machine and several between machines."
        )
    return int(text or 0)


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in ("", "0", "false")


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
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
