"""A training binary: absl flags become a strategy, intervals and a trainer, and an exit code.

    LEARNING_RATE = flags.DEFINE_float("learning_rate", 1e-3, "Step size of Adam.")

    if __name__ == "__main__":
        ctl.run(Mnist, learning_rate=LEARNING_RATE)

This is the only place that reads the flags below. Settings of a model are flags of its own file,
handed to its constructor by name.
"""

import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from absl import app, flags
from ctl.config import define_flags, help_text, settle
from ctl.distribute import job_fingerprint
from ctl.distribute.platforms import detection
from ctl.distribute.topology import Topology
from ctl.errors import EXIT_INTERRUPTED, EXIT_RETRY, CtlError, UsageError
from ctl.io import directories, exit_hook, log_filter, paths
from ctl.supervision import heartbeat, signals

if TYPE_CHECKING:
    from ctl.trainer import Trainer

_AT_THE_END = 2**62  # a mark that no run reaches: evaluated at the end only


_PLAIN = (bool, int, float, str, list, type(None))  # what is compared between workers as it is
_WITH_A_CHECKPOINT = ("eval", "export", "predict")  # modes


def run(trainer: Callable[..., Any], **settings: Any) -> None:
    """Parses the command line, trains (or what --mode says), and ends the process with an exit code.

    Args:
      trainer: a Trainer subclass; called with the Trainer's own arguments and `settings`.
      settings: arguments of the subclass; absl flag holders are replaced by their values. Shown as
        hyperparameters.
    """
    exit_hook.install()
    heartbeat.here.start()
    code: Any = 0
    with signals.starting():
        try:
            define_flags()
            app.run(lambda _: _main(trainer, settings), flags_parser=parse)
        except flags.DuplicateFlagError as e:
            _fail(UsageError(f"a flag of the model has a name that ctl uses: {e}"))
        except SystemExit as e:
            code = e.code or 0
    if not isinstance(code, int):
        raise SystemExit(code)
    raise exit_hook.Exit(code)  # a new one: that of absl is part of a reference cycle


def parse(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Reads flags; --help prints the grouped list and ends with 0, a bad flag ends with 2."""
    before = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if any(a in ("--help", "-help", "-h", "-?", "--helpshort") for a in before):
        with contextlib.suppress(BrokenPipeError):
            print(help_text(values, argv[0]), flush=True)
        sys.exit(0)
    try:
        rest = values(argv)
        if len(rest) > 1:
            raise flags.Error(f"unexpected arguments {rest[1:]}; every setting is --name=value.")
    except flags.Error as e:
        _fail(UsageError(f"{str(e).rstrip('.')}. See --help."))
    try:
        detection.prepare()
    except UsageError as e:
        _fail(e)
    with log_filter.quiet():  # TensorFlow has absl look for GPUs before main is called
        import tensorflow as tf

        tf.config.list_physical_devices()
    return rest


def _main(trainer: Callable[..., Any], settings: dict) -> None:
    try:
        _work(trainer, settings)
    except CtlError as e:
        _fail(e)
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C before training.", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


def _fail(error: CtlError) -> None:
    print(f"{'error: ' if error.exit_code < 3 else ''}{error}", file=sys.stderr, flush=True)
    if error.exit_code == EXIT_RETRY:
        exit_hook.end(EXIT_RETRY)
    sys.exit(error.exit_code)


def _work(make_trainer: Callable[..., Any], settings: dict) -> None:
    log_filter.quiet_logs()
    logging.getLogger("ctl").setLevel(logging.INFO)
    values = flags.FLAGS
    settings = {k: v.value if isinstance(v, flags.FlagHolder) else v for k, v in settings.items()}
    settings = settle(values, settings, make_trainer)
    from ctl.training import platform_hooks

    me, places = detection.read(), directories.read(values.model_dir)
    values.model_dir = places.model_dir
    options = _options(values, settings, me)
    from ctl.checkpoints.export import parse_formats

    formats = parse_formats(values.export)
    _check_mode(values, formats, me)
    steps, epochs = _length(values)
    trainer = make_trainer(**{**settings, **options})
    if not hasattr(trainer, "hparams"):
        raise UsageError(
            f"{type(trainer).__name__}.__init__ does not call super().__init__(**options); write it as "
            "its first line, and take **options."
        )
    plain = {
        k: job_fingerprint.shown(k, v)
        for k, v in settings.items()
        if isinstance(v, (bool, int, float, str))
    }
    trainer.hparams = {**plain, **trainer.hparams}
    platform_hooks.prepare(trainer, places, values.report_hypertune, values.mode)
    _prepare(trainer, values)
    if not values["export"].present:  # what nobody asked for is not an error
        from ctl.checkpoints.export import possible

        formats = tuple(w for w in formats if values.model_dir and w in possible(trainer.model))
    if values.mode in ("train", "train_and_eval"):
        trainer.train(steps, epochs=epochs, export=formats)
        platform_hooks.hand_over(trainer, places, formats)
        platform_hooks.wait_for_evaluator(trainer, me)
        _leave(trainer)
        return
    if trainer.step == 0:
        raise UsageError(_nothing_saved(values))
    if values.mode == "eval":
        from ctl.training import evaluation

        evaluation.report(trainer, trainer._session, trainer.evaluate())
    elif values.mode == "predict":
        _predict(trainer, trainer.predict)
    else:
        for path in trainer.export(*formats):
            print(path)
        platform_hooks.hand_over(trainer, places, formats)
    _leave(trainer)


def _leave(trainer: "Trainer") -> None:
    """The last barrier of the workers: nothing comes after it but the end of the process."""
    if trainer.topology.num_workers > 1 and trainer._session is not None:
        from ctl.training.evaluation import leave_together

        leave_together(trainer._session)


def _check_mode(values: flags.FlagValues, formats: tuple[str, ...], me: Topology) -> None:
    """Raises UsageError for a --mode that needs what is not there."""
    if values.mode in _WITH_A_CHECKPOINT and not values.model_dir:
        raise UsageError(f"--mode={values.mode} needs --model_dir, where the checkpoints are.")
    if values.mode == "export" and not formats:
        raise UsageError("--mode=export got --export=none; expected formats, e.g. --export=keras.")
    if values.mode in _WITH_A_CHECKPOINT and not _has_checkpoints(values.model_dir):
        raise UsageError(_nothing_saved(values))
    if values.mode in _WITH_A_CHECKPOINT and me.evaluates:
        raise UsageError(
            f"--mode={values.mode} came in an evaluator task of TF_CONFIG, which follows a training. "
            "Leave --mode out, or unset TF_CONFIG."
        )


def _has_checkpoints(model_dir: str) -> bool:
    try:
        return paths.persistently(paths.path(f"{model_dir}/checkpoints").is_dir)
    except OSError as e:
        raise UsageError(f"--model_dir={model_dir} cannot be read: {e.strerror or e}.") from None


def _prepare(trainer: "Trainer", values: flags.FlagValues) -> None:
    """Hands the trainer what is no argument of its constructor, and has it build and restore."""
    if values.mode == "predict" and not hasattr(trainer, "predict"):
        raise UsageError(
            f"--mode=predict: {type(trainer).__name__} has no method predict(self); expected one that "
            "yields a dictionary per example."
        )
    for name in ("jit_compile", "check_collectives", "step_timeout_secs", "allow_config_change"):
        if not values[name].using_default_value or not getattr(trainer, name, False):
            setattr(trainer, name, getattr(values, name))
    if not values["init_from"].using_default_value or not getattr(trainer, "init_from", None):
        trainer.init_from = values.init_from or None
    if values.mode in ("train", "train_and_eval"):
        from ctl.training.resume import claim

        claim(trainer)
    trainer.prepare()
    if values["on_nonfinite"].present:
        trainer.gradients = dataclasses.replace(trainer.gradients, on_nonfinite=values.on_nonfinite)


def _predict(trainer: "Trainer", predict: Callable[[], Iterable[Any]]) -> None:
    """Prints what the trainer's `predict` yields; every worker computes, the chief prints."""
    for row in predict():
        if trainer.topology.is_chief:
            print(json.dumps(row, default=lambda value: value.tolist()), flush=True)


def _nothing_saved(values: flags.FlagValues) -> str:
    return (
        f"--mode={values.mode} found no checkpoint in {values.model_dir}/checkpoints. Train first, or "
        "give the --model_dir of a run."
    )


def _length(values: flags.FlagValues) -> tuple[int | None, float | None]:
    if values.epochs and values["train_steps"].present and values.train_steps:
        raise UsageError(
            f"got --train_steps={values.train_steps} and --epochs={values.epochs}; expected one of them."
        )
    return (None, values.epochs) if values.epochs else (values.train_steps or None, None)


def _options(values: flags.FlagValues, settings: Mapping[str, Any], me: Topology) -> dict[str, Any]:
    """The Trainer's arguments from the flags, and from objects that `ctl.run` was given for them."""
    from ctl.callbacks.schedule import Every, Intervals
    from ctl.checkpoints.retention import Keep

    keep = Keep.parse(values.keep)
    evaluate = Every()
    has_evaluator = me.has_evaluator and not values.eval_every_steps
    evaluates = keep.best is not None or values.report_hypertune or not has_evaluator
    if values.mode == "train_and_eval" and evaluates:
        evaluate = Every(steps=values.eval_every_steps or _AT_THE_END)
    intervals = Intervals(
        steps_per_loop=_steps_per_loop(str(values.steps_per_loop)),
        log=Every(steps=values.log_every_steps),
        save=Every(steps=values.save_every_steps),
        evaluate=evaluate,
    )
    given = settings.get("intervals")
    if given is not None:
        flag_of = {"steps_per_loop": "steps_per_loop", "log": "log_every_steps",
                   "save": "save_every_steps", "evaluate": "eval_every_steps"}  # fmt: skip
        asked = {n: getattr(intervals, n) for n, flag in flag_of.items() if values[flag].present}
        intervals = dataclasses.replace(given, **asked)
    checkpoints = settings.get("checkpoints")
    from ctl.distribute import strategies

    strategy = (
        values.strategy
        if not isinstance(values.strategy, str)
        else strategies.make(
            values.strategy,
            devices=values.devices,
            num_virtual_devices=values.num_virtual_devices,
            cross_device_ops=values.cross_device_ops,
            communication=values.communication,
            timeout_secs=values.collective_timeout_secs,
            heartbeat_secs=values.heartbeat_secs,
            tpu=values.tpu,
            variable_partitioner=values.variable_partitioner,
            flags=_given(values),
            startup_timeout_secs=values.startup_timeout_secs or None,
            topology=me,
        )
    )
    if values.model_dir and (checkpoints is None or values["keep"].present):
        from ctl.checkpoints.chief_only import ChiefOnlyCheckpoints

        checkpoints = ChiefOnlyCheckpoints(
            f"{values.model_dir}/checkpoints", keep=keep, background=values.background_save
        )
    return {
        "model_dir": values.model_dir or None,
        "strategy": strategy,
        "global_batch_size": values.global_batch_size,
        "seed": values.seed,
        "intervals": intervals,
        "checkpoints": checkpoints,
    }


def _given(values: flags.FlagValues) -> dict[str, Any]:
    """The flags that workers must agree on: all but those of absl itself."""
    return {
        flag.name: flag.value if isinstance(flag.value, _PLAIN) else type(flag.value).__name__
        for module, found in values.flags_by_module_dict().items()
        if not module.startswith("absl")
        for flag in found
    }


def _steps_per_loop(text: str) -> int | str:
    if text in ("auto", "0"):
        return "auto"
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"--steps_per_loop is {text!r}; expected a number of steps, or auto.")
    return int(text)
