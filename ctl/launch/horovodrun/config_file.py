"""Options from a YAML file, in horovodrun's layout; an option of the command line wins.

params:
  fusion_threshold_mb: 32
timeline:
  filename: /tmp/timeline.json
stall_check:
  enabled: true
  warning_time_seconds: 120
"""

from collections.abc import Callable
from typing import Any

from ctl.errors import UsageError
from ctl.io.console import quoted
from ctl.launch.horovodrun import options
from ctl.launch.horovodrun.console import say
from ctl.launch.horovodrun.flags import FLAGS

# section -> name there -> the option that says the same; after "!" the one for `false`
_SECTIONS = {
    "params": {
        "fusion_threshold_mb": "--fusion-threshold-mb", "cycle_time_ms": "--cycle-time-ms",
        "cache_capacity": "--cache-capacity",
        "hierarchical_allreduce": "--hierarchical-allreduce!--no-hierarchical-allreduce",
        "hierarchical_allgather": "--hierarchical-allgather!--no-hierarchical-allgather",
        "torus_allreduce": "--torus-allreduce!--no-torus-allreduce",
    },
    "autotune": {
        "enabled": "--autotune!--no-autotune", "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {
        "filename": "--timeline-filename",
        "mark_cycles": "--timeline-mark-cycles!--no-timeline-mark-cycles",
    },
    "stall_check": {
        "enabled": "--stall-check!--no-stall-check",
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": "--mpi-threads-disable!--no-mpi-threads-disable",
        "num_nccl_streams": "--num-nccl-streams", "thread_affinity": "--thread-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "logging": {
        "level": "--log-level",
        "with_timestamp": "--log-with-timestamp!--log-without-timestamp",
    },
}  # fmt: skip


def add(asked: dict[str, Any], path: str, load: Callable[[str], object] | None = None) -> None:
    """Adds what the file says and the line does not; UsageError for what cannot be used.

    Args:
      load: turns the text into dicts; by default PyYAML does.
    """
    content = _content(path, load or _yaml())
    controller = content.pop("controller", None)
    if controller not in (None, "gloo"):
        raise UsageError(f"{path} asks for the controller {controller!r}; {NO_MPI}")
    said = options.nothing()
    for section, values in content.items():
        known = _SECTIONS.get(str(section).replace("-", "_"))
        if known is None:
            say(
                f"{path} has a part {quoted(str(section))}, which ctlrun does not know; it is ignored"
            )
            continue
        if not isinstance(values, dict | None):
            raise UsageError(
                f"{path} has `{section}: {values}`; expected names and values in it, such as "
                f"{', '.join(sorted(known)[:3])}"
            )
        for name, value in (values or {}).items():
            if value is not None:
                _put(
                    said, path, f"{section}: {name}", known.get(str(name).replace("-", "_")), value
                )
    for key, value in said.items():
        if asked[key] is None:
            asked[key] = value


NO_MPI = "there is no MPI here: collectives go over TCP. Write --gloo, or leave it out."


def _put(said: dict[str, Any], path: str, where: str, names: str | None, value: object) -> None:
    if names is None:
        say(f"{path} has `{where}`, which is no option of ctlrun; it is ignored")
        return
    on, _, off = names.partition("!")
    if off and not isinstance(value, bool):
        raise UsageError(f"{path} has `{where}: {value}`; expected true or false")
    name = off if off and not value else on
    options.put(said, FLAGS[name], f"{path}: `{where}`", [value])


def _content(path: str, load: Callable[[str], object]) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            content = load(file.read())
    except OSError as e:
        raise UsageError(f"--config-file {path} cannot be read ({e.strerror})") from None
    except Exception as e:
        first = str(e).splitlines()[:1]
        raise UsageError(f"--config-file {path} is no YAML: {' '.join(first)}") from None
    if not isinstance(content, dict | None):
        raise UsageError(f"--config-file {path} holds {type(content).__name__}, expected parts")
    return dict(content or {})


def _yaml() -> Callable[[str], object]:
    try:
        import yaml
    except ImportError:
        raise UsageError("--config-file needs PyYAML: `pip install pyyaml`") from None
    return yaml.safe_load
