"""Settings of a run: `Config`, which defines the flags, --help, docs/flags.md and keywords of trainers.

A flag has priority over a keyword of the constructor or of `ctl.run`, a keyword over a default of the
class, and a default of the class over the default of the field.

>>> ctl.Config(model_dir="/tmp/mnist", global_batch_size=256)
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from os import PathLike
from typing import TYPE_CHECKING, Any

from absl import flags
from ctl.errors import UsageError
from ctl.setting_names import suggest
from ctl.setting_values import are_names, check_integer, parse_step_range, parse_steps_per_loop

if TYPE_CHECKING:
    import tensorflow as tf
    from ctl.setting_types import RunSettings
    from typing_extensions import Unpack


def _field(value_type: str, default: Any, text: str) -> Any:
    """Returns a field.

    Args:
      value_type: "text", "bool", "list", "names" (several of the values in `default`), "choice" (one of
        the values in `default`, of which the first is the default), "real" (>= 0), "number" (integer >= 0),
        "positive" (integer >= 1), "steps" (integer or "auto"), "range" ("first:last" or "") or "compile"
        (one of the values in `default`, or a bool).
      default: Default value, or the possible values.
      text: Help of the flag.
    """
    choices = default if value_type in ("choice", "compile", "names") else ()
    first = () if value_type == "names" else default[0] if choices else default
    metadata = {"type": value_type, "choices": choices, "help": text}
    return dataclasses.field(default=first, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a run. docs/flags.md describes each setting with its unit.

    The settings in RUN_SETTINGS are for `ctl.run`; `ctl.Trainer` uses the other settings. The constructor
    raises UsageError for an invalid value and for an unknown name.
    """

    # fmt: off
    # Task of the run
    mode: str = _field("choice", ("train_and_eval", "train", "eval", "export", "predict"),
        "Task. predict prints one JSON line per example.")
    model_dir: str = _field("text", "",
        "Directory of the run: checkpoints, logs, export; a run resumes from it. Empty: "
        "AIP_CHECKPOINT_DIR on Vertex AI; elsewhere no files are written.")
    train_steps: int = _field("number", 1000,
        "Total number of steps, including those before a resume. 0: until the data ends.")
    max_secs: float = _field("real", 0.0,
        "Time limit of the training (seconds): the run logs, saves a checkpoint and exits with 0, without "
        "the last evaluation and the export. 0: none.")
    fast_dev_run: bool = _field("bool", False,
        "Check the program with 2 steps, an evaluation of 2 batches, a checkpoint and an export, all in a "
        "temporary directory, which is removed.")
    epochs: float = _field("real", 0.0,
        "Total number of passes over the training data, instead of --train_steps. 0: off.")
    global_batch_size: int = _field("positive", 128,
        "Examples per step, over all replicas of all workers.")
    seed: int = _field("number", 0,
        "Seed of all random numbers, the same on all workers.")
    init_from: str = _field("text", "",
        "Checkpoint, or model_dir of another run, from which the model is initialized if model_dir has no "
        "checkpoint. Empty: none.")
    # Devices and processes
    strategy: "str | tf.distribute.Strategy" = _field(
        "choice",
        ("auto", "default", "one_device", "mirrored", "multi_worker", "parameter_server",
         "central_storage", "tpu"),
        "Distribution strategy. auto chooses by TF_CONFIG and the number of devices.")
    devices: Sequence[str] = _field("list", (),
        "Devices for one_device and mirrored, such as cpu:0,cpu:1. Empty: the strategy's choice.")
    num_virtual_devices: int = _field("number", 0,
        "Logical devices to split the CPU into, to test several replicas. 0: off.")
    cross_device_ops: str = _field(
        "choice", ("auto", "nccl", "hierarchical_copy", "reduction_to_one_device"),
        "All-reduce algorithm of mirrored.")
    communication: str = _field("choice", ("auto", "ring", "nccl", "tcp", "mpi"),
        "All-reduce of multi_worker: TensorFlow's ring or nccl, or ctl's tcp, or mpi below mpirun. auto "
        "measures ring and tcp on CPUs.")
    sync_every: int = _field("positive", 1,
        "Steps between averages of the weights of multi_worker. 1: gradients are summed in each step.")
    outer_learning_rate: float = _field("real", 1.0,
        "Learning rate of DiLoCo, applied to the averaged weight differences.")
    outer_momentum: float = _field("real", 0.0,
        "Nesterov momentum of DiLoCo. 0 with outer_learning_rate=1: average of the weights.")
    collective_timeout_secs: float = _field("real", 0.0,
        "Timeout of one all-reduce of multi_worker (seconds). 0: no limit while the other workers run.")
    heartbeat_secs: float = _field("real", 0.0,
        "Seconds without a heartbeat after which multi_worker considers a worker lost. 0: "
        "TensorFlow's default.")
    elastic: str = _field("text", "",
        "Numbers of workers between which the job continues, as MIN:MAX; ctl launch --workers=MIN:MAX sets "
        "it. Empty: a lost worker ends the job.")
    tpu: str = _field("text", "",
        "Name or address of the TPU for --strategy=tpu. Empty: from the environment.")
    variable_partitioner: str = _field("text", "",
        "Partitioner of variables on parameter servers: min_size:256K, max_shards:2 or fixed_shards:2. "
        "Empty: none.")
    # Loop
    overfit_batches: int = _field("number", 0,
        "Number of batches to train on repeatedly, to check that the model can learn them. 0: all data.")
    max_eval_batches: int = _field("number", 0,
        "Maximum number of batches of an evaluation. 0: all.")
    steps_per_loop: int | str = _field("steps", "auto",
        "Steps per graph call; auto (or 0) aims at half a second.")
    log_every_steps: int = _field("number", 100,
        "Steps between logs of the training metrics. 0: only at the end.")
    eval_every_steps: int = _field("number", 0,
        "Steps between evaluations. 0: at the end of a program, never in Trainer.train.")
    save_every_steps: int = _field("number", 500,
        "Steps between checkpoints, besides those before each evaluation and at the end. 0: only those.")
    evaluate_ema: bool = _field("bool", True,
        "Use the moving averages of the weights for evaluation, prediction and export if the optimizer has "
        "them (use_ema=True).")
    precision: str = _field(
        "choice", ("auto", "float32", "mixed_bfloat16", "mixed_float16", "bfloat16"),
        "Dtype policy of the layers that build() creates; auto: the global policy.")
    jit_compile: str | bool = _field("compile", ("off", "step", "loop"),
        "Compilation by XLA: off; forward and backward pass of a step (also --jit_compile alone); or loop, "
        "all steps of a graph call as one program, on one replica with data of ctl.from_arrays.")
    check_collectives: bool = _field("bool", False,
        "Compare the collectives of the workers before they run, and report lines that differ. Slow; for "
        "debugging.")
    profile: str = _field("range", "",
        "Steps to trace for TensorBoard's profile plugin: 100:110 traces the ten steps after step 100. "
        "Empty: none.")
    data_position: str = _field("choice", ("auto", "indexed", "skip", "iterator"),
        "How a resumed run restores its position in the data: by index, by skipping batches, or from a "
        "saved iterator.")
    # Output
    writers: Sequence[str] = _field("names", ("console", "tensorboard", "jsonl", "mlflow", "wandb"),
        "Metric writers: any of console, tensorboard, jsonl, mlflow and wandb. Default: console, and with "
        "a model_dir also tensorboard and jsonl.")
    keep: str = _field("text", "5",
        "Number of newest checkpoints to keep, optionally also the best and those of every k-th step: "
        "3,best=accuracy,every=1000. 0: all.")
    background_save: bool = _field("bool", False,
        "Write checkpoints in a background thread; needs memory for a copy of the state.")
    export: str = _field("text", "keras,saved_model",
        "Export formats, written to model_dir/export at the end: keras, saved_model, weights. "
        "generator:keras exports self.generator. none or 0: off.")
    report_hypertune: str = _field("text", "",
        "Evaluation metric, such as accuracy, to report to a tuning job on Vertex AI. Empty: none.")
    # Errors
    on_nonfinite: str = _field("choice", ("stop", "skip", "rollback"),
        "Reaction to a NaN or infinite loss or gradient: stop the run, skip the step, or roll back to a "
        "checkpoint and continue with the next data.")
    step_timeout_secs: float = _field("real", 0.0,
        "Seconds without a step after which the process prints all stacks and exits with 134. Compilation, "
        "evaluation and saving may take longer. 0: off.")
    startup_timeout_secs: float = _field("real", 0.0,
        "Seconds that multi_worker waits for workers at the start. 0: the launcher's limit, or 600.")
    allow_config_change: bool = _field("bool", False,
        "Resume although the seed, batch size, data or network have changed, with another order of "
        "examples or additions.")
    full_traceback: bool = _field("bool", False,
        "Print all frames of an uncaught error instead of only those in your files.")
    # fmt: on

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[RunSettings]) -> None: ...

    def __new__(cls, **settings: Any) -> "Config":
        """Creates a configuration and stores the names of the explicit settings."""
        for name in settings:
            check_name(name, "Config", NAMES)
        config = object.__new__(cls)
        object.__setattr__(config, "_explicit_names", frozenset(settings))
        return config

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = _check_setting(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @property
    def explicit_names(self) -> frozenset[str]:
        """Names of the settings that were given explicitly."""
        names: frozenset[str] = getattr(self, "_explicit_names", frozenset())
        return names

    def explicit_settings(self) -> dict[str, Any]:
        """Returns the settings that were given explicitly, by name."""
        return {name: getattr(self, name) for name in sorted(self.explicit_names)}

    def with_settings(self, **settings: "Unpack[RunSettings]") -> "Config":
        """Returns a copy with other explicit settings. Raises UsageError like the constructor."""
        return Config(**{**self.explicit_settings(), **settings})


FIELDS = {field.name: field for field in dataclasses.fields(Config)}
NAMES = tuple(FIELDS)
_TITLE_BY_FIRST_SETTING = {
    "mode": "Task",
    "strategy": "Devices and processes",
    "overfit_batches": "Loop",
    "writers": "Output",
    "on_nonfinite": "Errors",
}
GROUPS: dict[str, list[str]] = {}  # title -> names
for _name in NAMES:
    GROUPS.setdefault(_TITLE_BY_FIRST_SETTING.get(_name) or list(GROUPS)[-1], []).append(_name)
# common arguments of subclasses
CONSTRUCTOR_SETTINGS = ("model_dir", "strategy", "global_batch_size", "seed")
# not keywords of ctl.Trainer
RUN_SETTINGS = (
    *("mode", "train_steps", "epochs", "export", "report_hypertune", "full_traceback", "fast_dev_run"),
)


def check_name(name: str, where: str, expected: Sequence[str]) -> None:
    """Raises UsageError unless `name` is one of the expected settings. The message suggests others."""
    if name not in expected:
        reason = "a setting of ctl.run only" if name in FIELDS else "not a setting"
        raise UsageError(f"{where} got {name}=..., which is {reason}. {suggest(name, expected)}")


def parse_jit_compile(value: str | bool) -> str:
    """Returns "off", "step" or "loop": "off" for False, "step" for True. Raises UsageError otherwise."""
    choices = FIELDS["jit_compile"].metadata["choices"]
    choice = choices[int(value)] if isinstance(value, bool) else value
    if not isinstance(choice, str) or choice not in choices:
        raise UsageError(
            f"jit_compile is {value!r}; expected one of {', '.join(choices)}, or True or False."
        )
    return choice


def _check_setting(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Returns a value converted to the type of its field. Raises UsageError for an invalid value."""
    name, value_type, choices = field.name, field.metadata["type"], field.metadata["choices"]
    if value_type in ("number", "positive"):
        return check_integer(
            name, value, int(value_type == "positive"), 2**32 - 1 if name == "seed" else None
        )
    if value_type == "real":
        is_valid = (
            isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= float(value) < float("inf")
        )
        expected = "a number >= 0"
    elif value_type == "bool":
        is_valid, expected = isinstance(value, bool), "True or False"
    elif value_type in ("list", "names"):
        value = tuple(v for v in value.split(",") if v) if isinstance(value, str) else value
        is_valid = are_names(value) and (not choices or set(value) <= set(choices))
        expected = f"a list of {', '.join(choices)}" if choices else "a list of names"
    elif value_type == "choice":
        is_valid = value in choices if isinstance(value, str) else name == "strategy" and value is not None
        expected = f"one of {', '.join(choices)}"
    elif value_type in ("steps", "compile"):
        return parse_steps_per_loop(value) if value_type == "steps" else parse_jit_compile(value)
    elif value_type == "range":
        parse_step_range(value := "" if value is None else value)
        return value
    else:
        value = "" if value is None else str(value) if isinstance(value, PathLike) else value
        is_valid, expected = isinstance(value, str), "a string"
    if not is_valid:
        raise UsageError(f"{name} is {value!r}; expected {expected}.")
    convert: dict[str, Callable[[Any], Any]] = {"real": float, "list": tuple}
    convert["names"] = lambda names: tuple(dict.fromkeys(names))  # each once
    return convert.get(value_type, lambda same: same)(value)


def read_command_line(
    values: flags.FlagValues, keywords: Mapping[str, Any], trainer: Callable[..., Any]
) -> tuple[Config, dict[str, Any]]:
    """Returns the settings of the flags and of the keywords of `ctl.run`, and the remaining keywords.

    A keyword that the user's constructor defines is not a setting, unless it is in `CONSTRUCTOR_SETTINGS`.
    """
    remaining = dict(keywords)
    user_arguments = _user_arguments(trainer)
    settings = {}
    for name in NAMES:
        is_object = name == "writers" and not are_names(remaining.get(name))  # metric writers
        keyword = None if name in user_arguments or is_object else remaining.pop(name, None)
        if values[name].present:
            settings[name] = values[name].value
        elif keyword is not None:
            settings[name] = keyword
    return Config(**settings), remaining


def resolve_config(
    trainer: Callable[..., Any], config: Config | None, keywords: Mapping[str, Any] | None = None
) -> Config:
    """Returns the settings of a trainer from keywords, `config` and defaults of the class, by priority.

    Raises UsageError for a keyword that is not a setting.
    """
    if config is not None and not isinstance(config, Config):
        raise UsageError(
            f"the first argument is {config!r:.80}; expected a ctl.Config, or keywords such as "
            'model_dir="/tmp/run".'
        )
    settings = {} if config is None else config.explicit_settings()
    expected = [name for name in NAMES if name not in RUN_SETTINGS]
    for name, value in (keywords or {}).items():
        check_name(name, getattr(trainer, "__name__", "the trainer"), expected)
        settings[name] = value
    for name in NAMES:
        if name not in settings and (default := _user_default(trainer, name)) is not None:
            settings[name] = _checked_default(trainer, name, default)
    return Config(**settings)


def _checked_default(trainer: Callable[..., Any], name: str, value: Any) -> Any:
    """Returns the validated default of a class. The attribute may have another meaning for the user."""
    try:
        return _check_setting(FIELDS[name], value)
    except UsageError as e:
        raise UsageError(
            f"{getattr(trainer, '__name__', 'the trainer')}.{e} {name} is a setting of ctl: give it such a "
            "value, or another name to the attribute."
        ) from None


def _user_default(trainer: Callable[..., Any], name: str) -> Any:
    """Returns the default of a setting in a class or in the signature of its constructor, or None."""
    for base in getattr(trainer, "__mro__", ()):
        if name in vars(base) and not base.__module__.startswith("ctl."):
            value = vars(base)[name]
            return None if hasattr(value, "__get__") else value  # a method or property is not a default
    parameter = _parameters(trainer).get(name) if name in CONSTRUCTOR_SETTINGS else None
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def as_keywords(config: Config, trainer: Callable[..., Any]) -> dict[str, Any]:
    """Returns the explicit settings as keywords, without arguments that the user's constructor defines."""
    left_out = {*RUN_SETTINGS, *_user_arguments(trainer)}
    return {name: value for name, value in config.explicit_settings().items() if name not in left_out}


def _user_arguments(trainer: Callable[..., Any]) -> set[str]:
    """Returns the arguments that the user's constructor defines, except those in `CONSTRUCTOR_SETTINGS`."""
    return set(_parameters(trainer)) - set(CONSTRUCTOR_SETTINGS)


def _parameters(trainer: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a function, or of the constructors that a class and its bases define."""
    classes = [c for c in getattr(trainer, "__mro__", ()) if not c.__module__.startswith("ctl.")]
    constructors = [vars(c)["__init__"] for c in classes if "__init__" in vars(c)]
    parameters: dict[str, inspect.Parameter] = {}
    for function in constructors if isinstance(trainer, type) else [trainer]:
        with contextlib.suppress(TypeError, ValueError):
            parameters = {**inspect.signature(function).parameters, **parameters}
    return parameters


def create_signature(constructor: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a constructor with all settings in place of `**settings`, for help()."""
    kinds = inspect.Parameter
    settings = [
        kinds(name, kinds.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for name, field in FIELDS.items()
        if name not in (*RUN_SETTINGS, "writers")  # a named argument
    ]
    named = [p for p in inspect.signature(constructor).parameters.values() if p.kind != kinds.VAR_KEYWORD]
    return inspect.Signature([*named, *settings])
