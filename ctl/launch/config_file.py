"""Options from a YAML file in horovodrun's layout. Options of the command line have priority.

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
from ctl.launch.horovodrun_options import FLAGS, no_options, put_option, report

NO_MPI = "there is no MPI here: collectives go over TCP. Write --gloo, or leave it out."
_SECTIONS = {  # section -> prefix of its options, names in it
    "params": ("", "fusion_threshold_mb cycle_time_ms cache_capacity hierarchical_allreduce "
               "hierarchical_allgather torus_allreduce"),
    "autotune": ("autotune-", "enabled log_file warmup_samples steps_per_sample bayes_opt_max_samples "
                 "gaussian_process_noise"),
    "timeline": ("timeline-", "filename mark_cycles"),
    "stall_check": ("stall-check-", "enabled warning_time_seconds shutdown_time_seconds"),
    "library_options": ("", "mpi_threads_disable num_nccl_streams thread_affinity "
                        "gloo_timeout_seconds"),
    "logging": ("log-", "level with_timestamp"),
}  # fmt: skip


def add_config_file(
    options: dict[str, Any], path: str, load: Callable[[str], object] | None = None
) -> None:
    """Adds the options of the file that the command line does not set. Raises UsageError.

    Args:
      options: Key -> value, None for an option that is not set. Modified in place.
      path: Path of the file.
      load: Parses the text into dicts. Default: PyYAML.
    """
    content = _content(path, load or _yaml())
    controller = content.pop("controller", None)
    if controller not in (None, "gloo"):
        raise UsageError(f"{path} asks for the controller {controller!r}; {NO_MPI}")
    found = no_options()
    for section, values in content.items():
        prefix, known = _SECTIONS.get(str(section).replace("-", "_"), ("", ""))
        if not known:
            name = quoted(str(section))
            report(f"{path} has a part {name}, which ctlrun does not know; it is ignored")
            continue
        names = known.split()
        if not isinstance(values, dict | None):
            raise UsageError(
                f"{path} has `{section}: {values}`; expected names and values in it, such as "
                f"{', '.join(sorted(names)[:3])}"
            )
        for name, value in (values or {}).items():
            where = f"{section}: {name}"
            if str(name).replace("-", "_") not in names and value is not None:
                report(f"{path} has `{where}`, which is no option of ctlrun; it is ignored")
            elif value is not None:
                _put(found, path, where, prefix + str(name).replace("_", "-"), value)
    for key, value in found.items():
        if options[key] is None:
            options[key] = value


def _put(found: dict[str, Any], path: str, where: str, name: str, value: object) -> None:
    name = name.removesuffix("-enabled")
    flag = FLAGS[f"--{name}"]
    if flag.takes is None and not isinstance(value, bool):
        raise UsageError(f"{path} has `{where}: {value}`; expected true or false")
    if flag.takes is None and not value:
        flag = FLAGS.get(f"--no-{name}") or FLAGS["--" + name.replace("with-", "without-")]
    put_option(found, flag, f"{path}: `{where}`", [value])


def _content(path: str, load: Callable[[str], object]) -> dict[Any, Any]:
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
        raise UsageError(
            "--config-file needs PyYAML; write `pip install 'tf-ctl[deploy]'`, or pyyaml"
        ) from None
    return yaml.safe_load
