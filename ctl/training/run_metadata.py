"""Description of a run for metric writers: header, resumed line, summary and configuration."""

import contextlib
import json
import logging
import os
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf
from ctl import config
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.tracked_state import weights_of
from ctl.data.pipeline import Batches
from ctl.distribute import job_fingerprint
from ctl.distribute.keras_objects import attribute, unwrap
from ctl.distribute.world import World
from ctl.fast_dev_run import is_temporary
from ctl.io import paths
from ctl.metrics.parameters import Parameter, parameter_total
from ctl.metrics.protocol import Joined, RunInfo
from ctl.tensorflow_patches import optimizer_attributes
from ctl.trackers import run_ids
from ctl.training.prepared import PreparedTrainer
from ctl.training.run_options import RunOptions
from ctl.training.run_result import RunResult
from ctl.training.task import Task
from ctl.version import __version__

_GIT_SECS = 2.0
_MAX_NAME_LENGTH = 200
_SETTINGS_IN_NAMES = (  # settings that influence the results, besides the hyperparameters
    *("train_steps", "epochs", "precision", "sync_every", "outer_learning_rate", "outer_momentum"),
    *("jit_compile", "overfit_batches", "on_nonfinite", "init_from"),
)
_log = logging.getLogger("ctl")


def run_info(prepared: PreparedTrainer, options: RunOptions, batches: Batches) -> RunInfo:
    """Returns the values that do not change during a run."""
    settings, world, activity = prepared.config, prepared.world, prepared.activity
    writes_files = world.is_chief and bool(settings.model_dir)
    common = {"global_batch_size": settings.global_batch_size, "seed": settings.seed}
    return RunInfo(
        model=prepared.task.class_name,
        strategy=world.strategy_name,
        num_workers=world.num_training_workers,
        num_replicas=world.topology.num_replicas,
        data=batches.description,
        precision=_policy_name(prepared),
        model_dir=settings.model_dir or None,
        parameters=parameters_of(prepared),
        config={**configuration(prepared, options), **(_origin(options.hparams) if writes_files else {})},
        hparams={**common, **options.hparams},
        run_id=run_ids.run_id_of(settings.model_dir, activity.new_run_id) if world.is_chief else "",
        name=_run_name(settings, {**options.hparams, **common}),
        **common,
    )


def joined_run(prepared: PreparedTrainer) -> Joined:
    """Returns the event of a process that adds metrics to the run in `model_dir`."""
    model_dir = prepared.config.model_dir
    run_id = run_ids.run_id_of(model_dir, prepared.activity.new_run_id)
    return Joined(run_id, prepared.task.class_name, model_dir)


def _run_name(settings: config.Config, hparams: Mapping[str, Any]) -> str:
    """Returns the settings that `ctl sweep` varies, else those that influence the results, as text."""
    if swept_settings := os.environ.get("CTL_SWEPT_SETTINGS", ""):
        return swept_settings
    values = dict(hparams)
    for name in _SETTINGS_IN_NAMES:
        if name in settings.explicit_names:
            values.setdefault(name, getattr(settings, name))
    name = ",".join(f"{key}={_short(value)}" for key, value in values.items())
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[: _MAX_NAME_LENGTH - 3]}..."


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _policy_name(prepared: PreparedTrainer) -> str:
    """Returns the name of the dtype policy of the model, "float32" for a model without one."""
    return str(getattr(getattr(prepared.task.model, "dtype_policy", None), "name", "float32"))


def parameters_of(prepared: PreparedTrainer) -> tuple[Parameter, ...]:
    """Returns the weights of the models under their names in checkpoints."""
    weight_ids = {id(unwrap(v)) for owner in prepared.task.owners.values() for v in weights_of(owner)}
    return tuple(
        (name, tuple(d or 0 for d in v.shape.as_list()), v.dtype.name, bool(v.trainable))
        for name, v in prepared.state.variables.items()
        if id(v) in weight_ids
    )


def describe_trainer(class_name: str, world: World, model_dir: str | None, prepared: Any) -> str:
    """Returns the `repr` of a trainer. `prepared` is None before the model is built."""
    num_replicas, step = world.topology.num_replicas, 0
    if prepared is not None:
        checkpointing = prepared.checkpointing
        step = checkpointing.step if tf.executing_eagerly() else checkpointing.last_step
    strategy = f"strategy {world.strategy_name}"
    facts = [
        f"step {step}",
        strategy + (f" with {num_replicas} replicas" if num_replicas > 1 else ""),
        f"model_dir {model_dir!r}" if model_dir else "no model_dir",
    ]
    if prepared is None:
        facts.append("not built")
    else:
        facts.append(f"{parameter_total(parameters_of(prepared)).num_values:,} parameters")
    return f"{class_name}({', '.join(facts)})"


def configuration(prepared: PreparedTrainer, options: RunOptions) -> dict[str, Any]:
    """Returns the settings and versions of a run."""
    settings, topology, intervals = prepared.config, prepared.world.topology, options.intervals
    return {
        "model": prepared.task.class_name,
        "strategy": prepared.world.strategy_name,
        "workers": topology.num_workers,
        "replicas": topology.num_replicas,
        "global_batch_size": settings.global_batch_size,
        "seed": settings.seed,
        "precision": _policy_name(prepared),
        **({"overfit_batches": settings.overfit_batches} if settings.overfit_batches else {}),
        "steps_per_loop": intervals.steps_per_loop,
        "log_every": str(intervals.log),
        "evaluate_every": str(intervals.evaluate),
        "save_every": str(intervals.save),
        "gradients": str(prepared.task.gradients),
        **options.hparams,
        "tensorflow": tf.__version__,
        "ctl": __version__,
    }


def _origin(hparams: Mapping[str, Any]) -> dict[str, str]:
    """Returns the command and the commit of the program's repository, if it has one."""
    flags = {*config.NAMES, *config.RUN_SETTINGS, *hparams}
    origin = {"command": _shown_command(sys.orig_argv, flags)}
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    command = ["git", "-C", os.path.dirname(os.path.abspath(program)) if program else os.getcwd()]
    command += ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError):
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, **streams) as process:  # type: ignore[call-overload]
            poller = select.poll()  # `select.select` is limited to descriptors below 1024
            poller.register(process.stdout, select.POLLIN)
            if not poller.poll(1000 * _GIT_SECS):
                process.kill()
            output = process.stdout.read().decode().strip()
        if process.returncode == 0:
            origin["git_commit"] = output
    return origin


def _shown_command(arguments: Sequence[str], known_flags: Collection[str]) -> str:
    """Returns a command line without the values of unknown flags, which may be secrets."""
    shown: list[str] = []
    hides_next = False  # unless the next argument is a flag
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        is_flag = argument.startswith("-") and len(name) > 1  # absl accepts -name; -m is Python's
        is_known = name in known_flags or name.removeprefix("no") in known_flags
        is_secret = is_flag and job_fingerprint.looks_secret(name)
        if hides_next and not argument.startswith("-"):
            shown.append("...")
            hides_next = False
        elif not is_flag or (is_known and not is_secret):
            shown.append(shlex.quote(argument))
            hides_next = False
        else:
            shown.append(shlex.quote(f"{flag}=..." if equals else flag))
            hides_next = not equals and (is_secret or flag.startswith("--"))
    return " ".join(shown)


def plain_configuration(prepared: PreparedTrainer, options: RunOptions) -> dict[str, Any]:
    """Returns the configuration as JSON values."""
    return json.loads(json.dumps(configuration(prepared, options), default=str))


def write_config(prepared: PreparedTrainer, options: RunOptions) -> None:
    """Writes `model_dir/config.json` on the chief."""
    model_dir = prepared.config.model_dir
    if not prepared.world.is_chief or not model_dir:
        return
    final = paths.path(model_dir) / "config.json"
    settings = {name: vars(prepared.config)[name] for name in config.NAMES}
    settings["strategy"] = prepared.world.strategy_name
    content = {**configuration(prepared, options), "settings": settings}
    try:
        paths.write_atomically(final, json.dumps(content, indent=1, default=str) + "\n")
    except OSError as e:
        _log.warning("%s cannot be written (%s); training continues.", final, e.strerror or e)


def resumed_line(manifest: Manifest | None, total: int | None) -> str | None:
    """Returns a line about the resumed checkpoint, its age and restarts; None for a fresh start."""
    attempt = _attempt()
    if manifest is None or manifest.step == 0:
        return f"{attempt}, from the beginning" if attempt else None
    share = f" ({100 * manifest.step / total:.0f} %)" if total and total >= manifest.step else ""
    secs = max(0.0, time.time() - manifest.created)
    units = ((172800, 86400, "days"), (7200, 3600, "h"), (120, 60, "min"), (0, 1, "s"))
    size, unit = next((size, unit) for least, size, unit in units if secs >= least)
    line = f"resuming at step {manifest.step}{share}, saved {secs / size:.0f} {unit} ago"
    return f"{line}; {attempt}" if attempt else line


def _attempt() -> str | None:
    """Returns the number and the reason of the newest restart by the launcher, or None."""
    count, reason = os.environ.get("CTL_ATTEMPT", ""), os.environ.get("CTL_RESTART_REASON", "")
    if not count.isdigit() or int(count) < 2:
        return None
    return f"attempt {count}" + (f" after: {reason}" if reason else "")


def label_of(attributes: Mapping[str, Any], default: Any, optimizer: Any) -> str:
    """Returns the attribute of an optimizer for reports, an empty string for the default optimizer."""
    if optimizer is default:
        return ""
    return next((name for name, other in named_optimizers(attributes).items() if other is optimizer), "")


def learning_rates(task: Task) -> dict[str, float]:
    """Returns `learning_rate` of the newest step, and `learning_rate/name` of each other optimizer."""
    rates: dict[str, float] = {}
    for name, optimizer in {"": task.optimizer, **named_optimizers(task.attributes)}.items():
        rate = None if name and optimizer is task.optimizer else _learning_rate(optimizer)
        if rate is not None:
            rates[f"learning_rate/{name}" if name else "learning_rate"] = rate
    return rates


def named_optimizers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes that are optimizers, also in lists, tuples and dictionaries."""
    optimizers: dict[str, Any] = {}
    for name, value in attributes.items():
        if name.startswith("_"):
            continue
        items: list = [(name, value)]
        if isinstance(value, (list, tuple)):
            items = [(f"{name}_{i}", v) for i, v in enumerate(value)]
        elif isinstance(value, Mapping):
            items = [(f"{name}_{k}", v) for k, v in value.items()]
        optimizers |= {n: v for n, v in items if attribute(v, "apply_gradients") or attribute(v, "apply")}
    return optimizers


def _learning_rate(optimizer: Any) -> float | None:
    """Returns the learning rate of the newest update of a Keras optimizer, or None if it has none."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    try:
        rate = optimizer_attributes.learning_rate_variable(optimizer)
        rate = rate if callable(rate) else optimizer.learning_rate
        if hasattr(rate, "get_config"):  # a schedule
            rate = rate(tf.maximum(tf.convert_to_tensor(optimizer.iterations) - 1, 0))
        elif callable(rate):
            rate = rate()
        return float(rate.numpy() if hasattr(rate, "numpy") else rate)
    except (AttributeError, TypeError, ValueError):
        return None


def summary_of(
    result: RunResult, steps: int, secs: float, directories: tuple[str, str], exported: Sequence[str]
) -> dict[str, Any]:
    """Returns label -> value, shown at the end of a run. Leaves out the paths of a temporary run.

    Args:
      result: Metrics and speed of the run.
      steps: Number of steps of the run.
      secs: Duration (seconds).
      directories: model_dir and the directory of TensorBoard's event files, or empty strings.
      exported: Paths of the exported models.
    """
    model_dir, log_dir = directories
    summary: dict[str, Any] = {"steps": steps, "time": f"{secs:.1f} s" if secs >= 1 else f"{secs:.2g} s"}
    if (rate := result.steps_per_sec) is not None:
        summary["speed"] = f"{rate:,.1f} steps/s" if rate >= 10 else f"{rate:.3g} steps/s"
    if (best := result.best) is not None:
        summary["best step"] = str(best.step)
        if best.name and not result.is_restored:
            summary[f"best {best.run} {best.name}"] = best.metrics[best.name]
    summary |= {
        f"{'eval' if result.metrics else 'train'} {name}": value
        for name, value in (result.metrics or result.means).items()
        if not name.startswith("gradient_norm")
    }
    if model_dir and not is_temporary(model_dir):
        summary |= {"checkpoints": f"{model_dir}/checkpoints"}
        summary |= {"export": ", ".join(exported)} if exported else {}
        summary |= {"logs": log_dir, "TensorBoard": f"{_tensorboard()} --logdir {log_dir}"}
    return summary


def _tensorboard() -> str:
    """Returns the command that starts TensorBoard, by path if it is not on PATH."""
    if shutil.which("tensorboard"):
        return "tensorboard"
    program = os.path.join(os.path.dirname(sys.executable), "tensorboard")
    return os.path.relpath(program) if os.path.exists(program) else f"{sys.executable} -m tensorboard.main"
