"""Main function of training programs: creates a trainer from absl flags and returns an exit code.

    LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Step size of Adam.")

    if __name__ == "__main__":
        ctl.run(Mnist, learning_rate=LEARNING_RATE)

Only this module reads the flags of `ctl`. A model defines flags for its own settings and passes them to
`ctl.run` by name.
"""

import contextlib
import dataclasses
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from absl import app, flags
from ctl import config as config_lib
from ctl import fast_dev_run, trainer_checks
from ctl.collectives.transports import mpi
from ctl.config import Config
from ctl.config_flags import define_flags, error_message, help_text
from ctl.distribute import job_fingerprint, mpi_cluster
from ctl.distribute.platforms import detection
from ctl.distribute.topology import Topology
from ctl.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RETRY, CtlError, StorageError, UsageError
from ctl.io import directories, disk_errors, error_report, exit_hook, log_filter, notebook, paths
from ctl.metrics.protocol import RunEnd
from ctl.metrics.results import Results
from ctl.supervision import heartbeat, signals

if TYPE_CHECKING:
    from ctl.distribute.world import World
    from ctl.trainer import Trainer


_PLAIN = (bool, int, float, str, list, tuple, type(None))  # types of values that workers compare directly
_REPORT_SECS = 10.0  # time for the chief to report an error that all workers have
_WITH_A_CHECKPOINT = ("eval", "export", "predict")  # modes


def run(trainer: Callable[..., Any], **settings: Any) -> None:
    """Parses the command line, runs the program in --mode, and ends the process with an exit code.

    Args:
      trainer: Trainer subclass or factory, called with the arguments of `ctl.Trainer` and `settings`.
      settings: Arguments of the subclass. absl flag holders are replaced by their values. Logged as
        hyperparameters.

    Raises UsageError in a notebook.
    """
    _check_not_in_notebook(trainer)
    exit_hook.install_exit_hook()
    heartbeat.current.start()
    gc.freeze()  # imported objects stay alive; scanning them took 0.2 s before the first step
    code: Any = 0
    with signals.immediate_exit():
        try:
            define_flags()
            app.run(lambda _: _main(trainer, settings), flags_parser=parse)
        except flags.DuplicateFlagError as e:
            _fail(UsageError(f"a flag of the model has the name of a flag of ctl; rename it: {e}"))
        except SystemExit as e:
            code = e.code or 0
    if not isinstance(code, int):
        raise SystemExit(code)
    raise exit_hook.Exit(code)  # a new exception, as that of absl is part of a reference cycle


def _check_not_in_notebook(make_trainer: Callable[..., Any]) -> None:
    if notebook.shell() is not None:
        name = getattr(make_trainer, "__name__", "Mnist")
        raise UsageError(
            "ctl.run(...) is the last line of a program: it reads the command line and ends the process. "
            f"This is a notebook. Write trainer = {name}(model_dir=...), then trainer.train(1000)."
        )


def parse(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Parses the flags. --help prints the grouped flags and exits with 0; an invalid flag exits with 2."""
    before = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if any(a in ("--help", "-help", "-h", "-?", "--helpshort") for a in before):
        with contextlib.suppress(BrokenPipeError):
            print(help_text(values, argv[0]), flush=True)
        sys.exit(0)
    try:
        positional = values(argv)
        if len(positional) > 1:
            raise flags.Error(f"unexpected arguments {positional[1:]}; every setting is --name=value.")
    except flags.Error as e:
        _fail(UsageError(f"{error_message(e, values)} See --help."))
    try:
        mpi_cluster.join_if_requested(
            values["communication"].value if "communication" in values else "auto"
        )
        detection.apply_settings()
    except CtlError as e:
        _fail(e)
    with log_filter.quiet():  # the search for GPUs, which TensorFlow makes absl do before main
        import tensorflow as tf

        tf.config.list_physical_devices()
    return positional


def _main(make_trainer: Callable[..., Any], settings: dict) -> None:
    try:
        with contextlib.ExitStack() as stack:
            _work(make_trainer, settings, stack)
    except CtlError as e:
        _fail(e)
    except Exception as e:
        if not error_report.can_shorten(e):
            raise
        mpi.record_failure()
        line = _line_of_a_worker(e)
        print(line or error_report.short_report(e), file=sys.stderr, flush=True)
        _await_report_of_chief(line)
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C before training.", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def _fail(error: CtlError) -> None:
    mpi.record_failure()
    line = _line_of_a_worker(error)
    print(f"{'error: ' if error.exit_code < 3 else ''}{line or error}", file=sys.stderr, flush=True)
    _await_report_of_chief(line)
    if error.exit_code == EXIT_RETRY:
        mpi.finalize(ends_last=True)
        exit_hook.end_process(EXIT_RETRY)
    sys.exit(error.exit_code)


def _await_report_of_chief(line: str) -> None:
    """Waits if a worker printed a line, as a launcher ends all processes after the first failure."""
    if line:
        time.sleep(_REPORT_SECS)


def _line_of_a_worker(error: BaseException) -> str:
    """Returns one line for an error that all workers have; "" for other errors and on the chief."""
    if not error_report.is_common(error):
        return ""
    with contextlib.suppress(UsageError):
        if not detection.read_topology().is_chief:
            first_line = (str(error).strip().splitlines() or [""])[0]
            if first_line == "in user code:":
                first_line = str(error).strip().splitlines()[-1].strip()
            return f"as on the chief, {type(error).__name__}: {first_line[:150]}"
    return ""


def _work(make_trainer: Callable[..., Any], settings: dict, stack: contextlib.ExitStack) -> None:
    trainer_checks.check_factory("ctl.run", make_trainer)
    log_filter.quiet_logs()
    logging.getLogger("ctl").setLevel(logging.INFO)
    values = flags.FLAGS
    keywords = {k: v.value if isinstance(v, flags.FlagHolder) else v for k, v in settings.items()}
    explicit, keywords = config_lib.read_command_line(values, keywords, make_trainer)
    from ctl.checkpoints.export import parse_formats
    from ctl.training import platform_hooks
    from ctl.training.task import Task

    config = config_lib.resolve_config(make_trainer, explicit)
    if config.full_traceback:
        error_report.show_full_tracebacks()
    mpi_cluster.join_if_requested(config.communication)
    topology, platform_dirs = detection.read_topology(), directories.read_directories(config.model_dir)
    is_short = config.fast_dev_run
    if is_short:
        explicit = stack.enter_context(fast_dev_run.temporary_run(explicit, config.mode, topology))
        config = config_lib.resolve_config(make_trainer, explicit)
        platform_dirs = directories.Directories(config.model_dir, logs=f"{config.model_dir}/logs")
    if platform_dirs.model_dir != config.model_dir:
        explicit, config = (c.with_settings(model_dir=platform_dirs.model_dir) for c in (explicit, config))
    parts = _parts(values, config, keywords, topology)
    formats = parse_formats(config.export)
    _check_mode(config, formats, topology)
    steps, epochs = _length(config, explicit)
    settings = config_lib.as_keywords(explicit, make_trainer)
    trainer = make_trainer(**{**keywords, **settings, **parts, "config": explicit})
    trainer_checks.check_result("ctl.run", trainer)
    hparams = {
        k: job_fingerprint.shown(k, v)
        for k, v in keywords.items()
        if isinstance(v, (bool, int, float, str))
    }
    trainer.hparams = {**hparams, **trainer.hparams}
    task, model_dir, is_chief = Task.of(trainer), trainer.model_dir or "", trainer.topology.is_chief
    platform_hooks.check_platform(task, config, model_dir, platform_dirs, is_chief=is_chief)
    if platform_dirs.logs:
        trainer.log_dir = platform_dirs.logs
    platform_writers = platform_hooks.writers_for_platform(config, topology)
    trainer.extra_writers = (*trainer.extra_writers, *platform_writers)
    _prepare(trainer, config, is_short=is_short)
    if "export" not in explicit.explicit_names:  # the default is not an error
        formats = _possible_formats(trainer, config, formats)
    if config.mode in ("train", "train_and_eval"):
        _train(trainer, (steps, epochs), formats, platform_dirs, topology, is_short=is_short)
    elif trainer.step == 0:
        raise UsageError(_no_checkpoint_message(config))
    elif config.mode == "eval":
        from ctl.training import evaluation

        evaluation.report_evaluation(trainer._prepare_trainer(), trainer._run_options, trainer.evaluate())
    elif config.mode == "predict":
        _predict(trainer, trainer.predict)
    else:
        for path in trainer.export(*formats):
            print(path)
        platform_hooks.hand_over(model_dir, platform_dirs, formats, is_chief=is_chief)
    _leave(trainer.topology, lambda: trainer._prepare_trainer().world)


def _train(
    trainer: "Trainer",
    length: tuple[int | None, float | None],
    formats: tuple[str, ...],
    platform_dirs: directories.Directories,
    topology: Topology,
    *,
    is_short: bool,
) -> None:
    """Trains for a number of steps or epochs, exports, and lets the evaluator finish."""
    from ctl.training import platform_hooks
    from ctl.training.task import Task

    steps, epochs = length
    model_dir, is_chief = trainer.model_dir or "", trainer.topology.is_chief
    result = trainer.train(steps, epochs=epochs, export=formats)
    if isinstance(result, Results) and result.end is RunEnd.TIME_LIMIT:
        return  # without an export
    if is_short:
        if is_chief:
            message = fast_dev_run.describe_success(trainer.step, result or {}, formats)
            logging.getLogger("ctl").info("%s", message)
        return
    platform_hooks.hand_over(model_dir, platform_dirs, formats, is_chief=is_chief)
    platform_hooks.let_evaluator_finish(Task.of(trainer), model_dir, trainer._checkpoints, topology)


def _possible_formats(trainer: "Trainer", config: Config, formats: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the default formats that the model supports. If there are none, logs the reason."""
    from ctl.checkpoints.export import default_formats, supported_formats

    if not config.model_dir or config.mode in ("eval", "predict"):
        return ()
    possible_formats = tuple(f for f in formats if f in supported_formats(trainer.model))
    if not possible_formats and config.mode != "export":
        try:
            default_formats(trainer)
        except UsageError as e:
            if trainer.topology.is_chief:
                logging.getLogger("ctl").info("No model is exported at the end: %s", e)
    return possible_formats


def _leave(topology: Topology, world: Callable[[], "World"]) -> None:
    """Waits for all workers before the process ends."""
    if topology.num_workers > 1:
        from ctl.training.evaluation import leave_together

        leave_together(world())


def _check_mode(config: Config, formats: tuple[str, ...], topology: Topology) -> None:
    """Raises UsageError if --mode needs a checkpoint or an export format that is missing."""
    if config.mode in _WITH_A_CHECKPOINT and not config.model_dir:
        raise UsageError(f"--mode={config.mode} needs --model_dir, where the checkpoints are.")
    if config.mode == "export" and not formats:
        raise UsageError("--mode=export got --export=none; expected formats, e.g. --export=keras.")
    if config.mode in _WITH_A_CHECKPOINT and not _has_checkpoints(config.model_dir):
        raise UsageError(_no_checkpoint_message(config))
    if config.mode in _WITH_A_CHECKPOINT and topology.evaluates:
        raise UsageError(
            f"--mode={config.mode} was given in an evaluator task of TF_CONFIG, which follows a training. "
            "Leave --mode out, or unset TF_CONFIG."
        )


def _has_checkpoints(model_dir: str) -> bool:
    try:
        return paths.call_with_retries(paths.path(f"{model_dir}/checkpoints").is_dir)
    except OSError as e:
        error = StorageError if disk_errors.is_transient(e) else UsageError
        raise error(f"--model_dir={model_dir} cannot be read: {e.strerror or e}.") from None


def _prepare(trainer: "Trainer", config: Config, *, is_short: bool) -> None:
    """Checks that the mode is possible, builds the model and restores the newest checkpoint."""
    from ctl.training import construction, resume_checks
    from ctl.training.user_methods import is_defined_by_user

    mode = config.mode
    if mode == "predict" and not is_defined_by_user(trainer, "predict"):
        raise UsageError(
            f"--mode=predict: {type(trainer).__name__} has no method predict(self); expected one that "
            "yields a dictionary per example."
        )
    if mode in ("train", "train_and_eval"):
        resume_checks.check_no_other_job(trainer.model_dir, trainer.topology)
    if is_short:  # the program may have a manager with another directory
        trainer._prepare_trainer(construction.checkpoints_of(config))
    trainer.prepare()


def _predict(trainer: "Trainer", predict: Callable[[], Iterable[Any]]) -> None:
    """Prints the predictions. Every worker computes them; only the chief prints."""
    with trainer._prepare_trainer().task.moving_averages.in_place():
        for row in predict():
            if trainer.topology.is_chief:
                print(json.dumps(row, default=_as_json), flush=True)


def _as_json(value: Any) -> Any:
    """Converts an array, tensor or bytes of `predict` for JSON. Raises UsageError for another type."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if hasattr(value, "numpy"):  # a tensor or a variable
        value = value.numpy()
        return value if isinstance(value, bytes) else value.tolist()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise UsageError(
        f"predict() yielded a {type(value).__name__}; expected a dictionary of numbers, texts, arrays or "
        "tensors for each example."
    )


def _no_checkpoint_message(config: Config) -> str:
    return (
        f"--mode={config.mode} found no checkpoint in {config.model_dir}/checkpoints. Train first, or "
        "give the --model_dir of a run."
    )


def _length(config: Config, explicit: Config) -> tuple[int | None, float | None]:
    """Returns the numbers of steps and of epochs to train; one of them is None."""
    if config.epochs and "train_steps" in explicit.explicit_names and config.train_steps:
        raise UsageError(
            f"got --train_steps={config.train_steps} and --epochs={config.epochs}; expected one of them."
        )
    return (None, config.epochs) if config.epochs else (config.train_steps or None, None)


def _parts(
    values: flags.FlagValues, config: Config, keywords: Mapping[str, Any], topology: Topology
) -> dict[str, Any]:
    """Returns arguments of the trainer's constructor: strategy, intervals and checkpoint manager.

    Explicit settings have priority over the `keywords` of `ctl.run`.
    """
    from ctl.callbacks.schedule import AT_THE_END, Every
    from ctl.checkpoints.retention import Keep
    from ctl.training import construction

    evaluate = Every()
    has_evaluator = topology.has_evaluator and not config.eval_every_steps
    evaluates = Keep.parse(config.keep).best is not None or config.report_hypertune or not has_evaluator
    if config.mode == "train_and_eval" and evaluates:
        evaluate = Every(steps=config.eval_every_steps) if config.eval_every_steps else AT_THE_END
    user_intervals = keywords.get("intervals")
    intervals = construction.intervals_of(config, user_intervals)
    if user_intervals is None or "eval_every_steps" in config.explicit_names:
        intervals = dataclasses.replace(intervals, evaluate=evaluate)
    parts: dict[str, Any] = {"intervals": intervals}
    if keywords.get("checkpoints") is None or "keep" in config.explicit_names:
        parts["checkpoints"] = construction.checkpoints_of(config)
    return parts | {"strategy": construction.strategy_of(config, _compared(values, config), topology)}


def _compared(values: flags.FlagValues, config: Config) -> dict[str, Any]:
    """Returns the values of the flags that must be equal on all workers: all except those of absl."""
    value_by_flag = {
        flag.name: vars(config).get(flag.name, flag.value)
        for module, of_module in values.flags_by_module_dict().items()
        if not module.startswith("absl")
        for flag in of_module
    }
    return {n: v if isinstance(v, _PLAIN) else type(v).__name__ for n, v in value_by_flag.items()}
