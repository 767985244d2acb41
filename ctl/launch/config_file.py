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

_SECTIONS = {  # section -> (prefix of its options, names of its keys)
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
    """Adds the options of the file that the command line does not set.

    Args:
      options: Key -> value, None for an option that is not set. Modified in place.
      path: Path of the file.
      load: Parses the text into dicts. Defaults to PyYAML.

    Raises:
      UsageError: The file cannot be read or contains an invalid value.
    """
    content = _load_content(path, load or _yaml_loader())
    controller = content.pop("controller", None)
    if controller not in (None, "gloo", "mpi"):
        raise UsageError(f"{path} specifies the controller {controller!r}; expected 'gloo' or 'mpi'")
    file_options = no_options()
    file_options["use_mpi"] = True if controller == "mpi" else None
    for section, values in content.items():
        prefix, option_names = _SECTIONS.get(str(section).replace("-", "_"), ("", ""))
        if not option_names:
            name = quoted(str(section))
            report(f"ignoring the section {name} of {path}, which ctlrun does not support")
            continue
        names = option_names.split()
        if not isinstance(values, dict | None):
            raise UsageError(
                f"{path} has `{section}: {values}`; expected a mapping with keys such as "
                f"{', '.join(sorted(names)[:3])}"
            )
        for name, value in (values or {}).items():
            yaml_entry = f"{section}: {name}"
            if str(name).replace("-", "_") not in names and value is not None:
                report(f"ignoring `{yaml_entry}` in {path}, which is not an option of ctlrun")
            elif value is not None:
                _put_yaml_option(
                    file_options, path, yaml_entry, prefix + str(name).replace("_", "-"), value
                )
    for key, value in file_options.items():
        if options[key] is None:
            options[key] = value


def _put_yaml_option(
    file_options: dict[str, Any], path: str, yaml_entry: str, name: str, value: object
) -> None:
    name = name.removesuffix("-enabled")
    flag = FLAGS[f"--{name}"]
    if flag.converter is None and not isinstance(value, bool):
        raise UsageError(f"{path} has `{yaml_entry}: {value}`; expected true or false")
    if flag.converter is None and not value:
        flag = FLAGS.get(f"--no-{name}") or FLAGS["--" + name.replace("with-", "without-")]
    put_option(file_options, flag, f"{path}: `{yaml_entry}`", [value])


def _load_content(path: str, load: Callable[[str], object]) -> dict[Any, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = load(file.read())
    except OSError as e:
        raise UsageError(f"--config-file {path} cannot be read ({e.strerror})") from None
    except Exception as e:
        first_line = str(e).splitlines()[:1]
        raise UsageError(f"--config-file {path} is not valid YAML: {' '.join(first_line)}") from None
    if not isinstance(content, dict | None):
        raise UsageError(
            f"--config-file {path} contains a {type(content).__name__}; expected a mapping of sections"
        )
    return dict(content or {})


def _yaml_loader() -> Callable[[str], object]:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "--config-file requires PyYAML; install it with `pip install 'tf-ctl[deploy]'` or `pip install "
            "pyyaml`"
        ) from None
    return yaml.safe_load
