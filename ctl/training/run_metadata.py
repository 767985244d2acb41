"""What a run tells its writers: the header, the resumed line, the summary, the configuration."""

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
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ctl import config
from ctl.checkpoints.protocol import Manifest
from ctl.checkpoints.tracked_state import TrackedState, collect_owners, weights_of
from ctl.data.pipeline import Batches
from ctl.distribute import job_fingerprint, parameter_servers, strategies
from ctl.distribute.keras_objects import attribute, plain
from ctl.io import paths
from ctl.metrics.parameters import Parameter, parameter_total
from ctl.metrics.protocol import RunInfo
from ctl.training.session import SessionOwner
from ctl.training.trainer_protocol import TrainerProtocol
from ctl.version import __version__

_GIT_SECS = 2.0
_log = logging.getLogger("ctl")


def log_dir(trainer: TrainerProtocol) -> str:
    """Returns the directory of TensorBoard's event files."""
    return trainer.log_dir or f"{trainer.model_dir}/logs"


def run_info(trainer: TrainerProtocol, state: TrackedState, batches: Batches) -> RunInfo:
    """What does not change during a run."""
    place = trainer.topology
    policy = getattr(trainer.model, "dtype_policy", None)
    served = parameter_servers.is_used(trainer.strategy)
    workers = parameter_servers.num_workers(trainer.strategy) if served else place.num_workers
    return RunInfo(
        model=type(trainer).__name__,
        strategy=strategies.word_of(trainer.strategy),
        num_workers=workers,
        num_replicas=place.num_replicas,
        global_batch_size=trainer.global_batch_size,
        data=batches.description,
        precision=getattr(policy, "name", "float32"),
        seed=trainer.seed,
        model_dir=trainer.model_dir,
        parameters=_parameters(trainer, state),
        config={**configuration(trainer), **_origin(trainer)},
        hparams={"global_batch_size": trainer.global_batch_size, "seed": trainer.seed, **trainer.hparams},
    )


def _parameters(trainer: TrainerProtocol, state: TrackedState) -> tuple[Parameter, ...]:
    """The weights of the models under the names of checkpoints."""
    known = {id(plain(v)) for thing in collect_owners(trainer).values() for v in weights_of(thing)}
    return tuple(
        (name, tuple(d or 0 for d in v.shape.as_list()), v.dtype.name, bool(v.trainable))
        for name, v in state.variables.items()
        if id(v) in known
    )


def one_line(trainer: SessionOwner) -> str:
    """Returns the `repr` of a trainer. It builds no model and raises no error."""
    kind, facts = type(trainer).__name__, []
    with contextlib.suppress(Exception):
        session, replicas = trainer._session, trainer.topology.num_replicas
        step = 0 if session is None else session.step if tf.executing_eagerly() else session.last_step
        strategy = f"strategy {strategies.word_of(trainer.strategy)}"
        directory = f"model_dir {trainer.model_dir!r}" if trainer.model_dir else "no model_dir"
        facts = [
            f"step {step}",
            strategy + (f" with {replicas} replicas" if replicas > 1 else ""),
            directory,
        ]
        if session is None:
            facts.append("not built")
        else:
            total = parameter_total(_parameters(trainer, session.state))
            facts.append(f"{total.num_values:,} parameters")
    return f"{kind}({', '.join(facts)})"


def configuration(trainer: TrainerProtocol) -> dict[str, Any]:
    """Everything a run was made of, JSON-able."""
    place, intervals = trainer.topology, trainer.intervals
    return {
        "model": type(trainer).__name__,
        "strategy": strategies.word_of(trainer.strategy),
        "workers": place.num_workers,
        "replicas": place.num_replicas,
        "global_batch_size": trainer.global_batch_size,
        "seed": trainer.seed,
        "steps_per_loop": intervals.steps_per_loop,
        "log_every": str(intervals.log),
        "evaluate_every": str(intervals.evaluate),
        "save_every": str(intervals.save),
        "gradients": str(trainer.gradients),
        **trainer.hparams,
        "tensorflow": tf.__version__,
        "ctl": __version__,
    }


def _origin(trainer: TrainerProtocol) -> dict[str, str]:
    """The command, and the commit of the program's repository, if it has one; said by the chief."""
    if not trainer.topology.is_chief or not trainer.model_dir:
        return {}
    found = {"command": _shown_command(sys.orig_argv, {*config.NAMES, *config.OF_RUN, *trainer.hparams})}
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    words = ["git", "-C", os.path.dirname(os.path.abspath(program)) if program else os.getcwd()]
    words += ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError):
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(words, **streams) as process:  # type: ignore[call-overload]
            if not select.select([process.stdout], [], [], _GIT_SECS)[0]:
                process.kill()
            said = process.stdout.read().decode().strip()
        if process.returncode == 0:
            found["git_commit"] = said
    return found


def _shown_command(words: Sequence[str], known: Collection[str]) -> str:
    """A command line without the values of flags that nobody has given to ctl: they may be secrets."""
    found: list[str] = []
    hides = False  # the next word, unless it is a flag
    for word in words:
        flag, equals, _ = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        is_flag = word.startswith("-") and len(name) > 1  # absl takes -name as well; -m is Python's
        is_known = name in known or name.removeprefix("no") in known
        is_secret = is_flag and job_fingerprint.looks_secret(name)
        if hides and not word.startswith("-"):
            word, hides = "...", False  # noqa: PLW2901
        elif not is_flag or (is_known and not is_secret):
            hides = False
        else:
            hides = not equals and (is_secret or flag.startswith("--"))
            word = f"{flag}=..." if equals else flag  # noqa: PLW2901
        found.append(word)
    return " ".join(word if word == "..." else shlex.quote(word) for word in found)


def plain_configuration(trainer: TrainerProtocol) -> dict[str, Any]:
    """The same in values that JSON gives back as they are."""
    return json.loads(json.dumps(configuration(trainer), default=str))


def write_config(trainer: TrainerProtocol) -> None:
    """`model_dir/config.json`, by the chief."""
    if not trainer.topology.is_chief or not trainer.model_dir:
        return
    final = paths.path(trainer.model_dir) / "config.json"
    settings = {name: vars(trainer.config)[name] for name in config.NAMES}
    settings["strategy"] = strategies.word_of(trainer.strategy)
    text = json.dumps({**configuration(trainer), "settings": settings}, indent=1, default=str) + "\n"
    try:
        paths.write_atomically(final, text)
    except OSError as e:
        _log.warning("%s cannot be written (%s); training goes on.", final, e.strerror or e)


def resumed_line(manifest: Manifest | None, total: int | None) -> str | None:
    """One line about where a run goes on, with its age and its restarts; None on a fresh start."""
    again = _attempt()
    if manifest is None or manifest.step == 0:
        return f"{again}, from the beginning" if again else None
    share = f" ({100 * manifest.step / total:.0f} %)" if total and total >= manifest.step else ""
    secs = max(0.0, time.time() - manifest.created)
    units = ((172800, 86400, "days"), (7200, 3600, "h"), (120, 60, "min"), (0, 1, "s"))
    size, unit = next((size, unit) for least, size, unit in units if secs >= least)
    line = f"resuming at step {manifest.step}{share}, saved {secs / size:.0f} {unit} ago"
    return f"{line}; {again}" if again else line


def _attempt() -> str | None:
    """What the launcher says of restarts, if there were any."""
    count, reason = os.environ.get("CTL_ATTEMPT", ""), os.environ.get("CTL_RESTART_REASON", "")
    if not count.isdigit() or int(count) < 2:
        return None
    return f"attempt {count}" + (f" after: {reason}" if reason else "")


def label_of(trainer: TrainerProtocol, optimizer: Any) -> str:
    """What reports call an optimizer: nothing for `self.optimizer`, else the name of the attribute."""
    if optimizer is trainer.optimizer:
        return ""
    return next((name for name, known in _optimizers(trainer).items() if known is optimizer), "")


def learning_rates(trainer: TrainerProtocol) -> dict[str, float]:
    """`learning_rate` that the newest step used, and `learning_rate/name` of each other optimizer."""
    found: dict[str, float] = {}
    for name, optimizer in {"": trainer.optimizer, **_optimizers(trainer)}.items():
        rate = None if name and optimizer is trainer.optimizer else _learning_rate(optimizer)
        if rate is not None:
            found[f"learning_rate/{name}" if name else "learning_rate"] = rate
    return found


def _optimizers(trainer: TrainerProtocol) -> dict[str, Any]:
    """The attributes that are optimizers, also in lists, tuples and dictionaries."""
    found: dict[str, Any] = {}
    for name, value in vars(trainer).items():
        if name.startswith("_"):
            continue
        items: list = [(name, value)]
        if isinstance(value, (list, tuple)):
            items = [(f"{name}_{i}", v) for i, v in enumerate(value)]
        elif isinstance(value, Mapping):
            items = [(f"{name}_{k}", v) for k, v in value.items()]
        found |= {n: v for n, v in items if attribute(v, "apply_gradients") or attribute(v, "apply")}
    return found


def _learning_rate(optimizer: Any) -> float | None:
    """Of a Keras optimizer, that of its newest update if it has a schedule; None if there is none."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    try:
        rate = getattr(optimizer, "_learning_rate", None)
        rate = rate if callable(rate) else optimizer.learning_rate
        if hasattr(rate, "get_config"):  # a schedule
            rate = rate(tf.maximum(tf.convert_to_tensor(optimizer.iterations) - 1, 0))
        elif callable(rate):
            rate = rate()
        return float(rate.numpy() if hasattr(rate, "numpy") else rate)
    except (AttributeError, TypeError, ValueError):
        return None


@dataclass(frozen=True)
class Measurements:
    """Speed and metrics of a run.

    Attributes:
      rates: (steps, seconds) of each log interval, training alone.
      means: Means of the newest log interval.
      metrics: Metrics of the newest evaluation; empty if there was none.
      best_step: Step of the weights that were restored at the end, or None.
    """

    rates: Sequence[tuple[int, float]]
    means: Mapping[str, float]
    metrics: Mapping[str, float]
    best_step: int | None


def summary_of(
    trainer: TrainerProtocol, measured: Measurements, steps: int, secs: float, exported: list[str]
) -> dict[str, Any]:
    """Returns label -> value, shown at the end of a run of `steps` steps in `secs` seconds."""
    summary: dict[str, Any] = {"steps": steps, "time": f"{secs:.1f} s"}
    timed_secs = sum(interval_secs for _, interval_secs in measured.rates)
    if timed_secs:
        summary["speed"] = f"{sum(count for count, _ in measured.rates) / timed_secs:,.1f} steps/s"
    if measured.best_step is not None:
        summary["best step"] = str(measured.best_step)
    summary |= {
        f"{'eval' if measured.metrics else 'train'} {name}": f"{value:.4f}"
        for name, value in (measured.metrics or measured.means).items()
        if not name.startswith("gradient_norm")
    }
    directory = trainer.model_dir
    if directory:
        summary |= {"checkpoints": f"{directory}/checkpoints"}
        summary |= {"export": ", ".join(exported)} if exported else {}
        if not paths.is_url(directory):
            summary |= {
                "logs": log_dir(trainer),
                "TensorBoard": f"{_tensorboard()} --logdir {log_dir(trainer)}",
            }
    return summary


def _tensorboard() -> str:
    """The command as a user would type it here: by name, or by path where it is not on PATH."""
    if shutil.which("tensorboard"):
        return "tensorboard"
    beside = os.path.join(os.path.dirname(sys.executable), "tensorboard")
    return os.path.relpath(beside) if os.path.exists(beside) else f"{sys.executable} -m tensorboard.main"
