"""Settings of a run: `Config`, which defines the flags, --help, docs/flags.md and keywords of trainers.

A flag has priority over a keyword of the constructor or of `ctl.run`, a keyword over a default of the
class, and a default of the class over the default of the field.

>>> ctl.Config(model_dir="/tmp/mnist", global_batch_size=256)
"""

import contextlib
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from os import PathLike
from typing import TYPE_CHECKING, Any

from absl import flags
from ctl.errors import UsageError

if TYPE_CHECKING:
    import tensorflow as tf


def _of(kind: str, default: Any, text: str) -> Any:
    """Returns a field.

    Args:
      kind: "text", "bool", "list", "word" (one of the values in `default`, the first of which is the
        default), "real" (>= 0), "number" (integer >= 0), "positive" (integer >= 1), "steps" (integer, or
        "auto"), "range" ("first:last" or "") or "compile" (one of the values in `default`, or a bool).
      default: Default value, or the possible values.
      text: Help of the flag.
    """
    words = default if kind in ("word", "compile") else ()
    first = default[0] if words else default
    return dataclasses.field(default=first, metadata={"kind": kind, "words": words, "help": text})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a run. docs/flags.md describes each setting with its unit.

    The settings in OF_RUN are for `ctl.run`; `ctl.Trainer` uses the other settings. The constructor raises
    UsageError for an invalid value and for an unknown name.
    """

    # fmt: off
    # Task of the run
    mode: str = _of("word", ("train_and_eval", "train", "eval", "export", "predict"),
        "What to do; predict prints a line of JSON per example.")
    model_dir: str = _of("text", "",
        "Directory of the run: checkpoints, logs, export; a run resumes from it. Empty: "
        "AIP_CHECKPOINT_DIR on Vertex AI, else nothing is kept.")
    train_steps: int = _of("number", 1000,
        "Total steps, resumed ones included. 0: until the data ends.")
    epochs: float = _of("real", 0.0,
        "Total passes over the training data, instead of --train_steps. 0: off.")
    global_batch_size: int = _of("positive", 128,
        "Examples per step, over all replicas of all workers.")
    seed: int = _of("number", 0,
        "Seed of all randomness, the same on every worker.")
    init_from: str = _of("text", "",
        "Checkpoint, or model_dir of another run, that initializes the model where model_dir has none. "
        "Empty: none.")
    # Devices and processes
    strategy: "str | tf.distribute.Strategy" = _of(
        "word",
        ("auto", "default", "one_device", "mirrored", "multi_worker", "parameter_server",
         "central_storage", "tpu"),
        "How to distribute; auto decides by TF_CONFIG and devices.")
    devices: Sequence[str] = _of("list", (),
        "Devices for one_device and mirrored, such as cpu:0,cpu:1. Empty: the strategy's choice.")
    num_virtual_devices: int = _of("number", 0,
        "Logical devices to split the CPU into, to test several replicas. 0: off.")
    cross_device_ops: str = _of("word", ("auto", "nccl", "hierarchical_copy", "reduction_to_one_device"),
        "How mirrored sums gradients.")
    communication: str = _of("word", ("auto", "ring", "nccl", "tcp"),
        "How multi_worker sums gradients: TensorFlow's ring or NCCL, ctl's own TCP; auto measures.")
    sync_every: int = _of("positive", 1,
        "Steps between averages of multi_worker's weights; 1: sums of every step's gradients.")
    outer_learning_rate: float = _of("real", 1.0, "DiLoCo's, of the differences every sync_every steps.")
    outer_momentum: float = _of("real", 0.0, "Nesterov momentum of those; 0 with rate 1 averages weights.")
    collective_timeout_secs: float = _of("real", 0.0,
        "Seconds that multi_worker waits in one all-reduce. 0: as long as the other workers live.")
    heartbeat_secs: float = _of("real", 0.0,
        "Seconds of silence after which multi_worker counts a worker as lost. 0: TensorFlow's choice.")
    tpu: str = _of("text", "",
        "Name or address of the TPU for --strategy=tpu. Empty: the environment's.")
    variable_partitioner: str = _of("text", "",
        "How parameter servers split variables: min_size:256K, max_shards:2 or fixed_shards:2. Empty: no.")
    # Loop
    steps_per_loop: int | str = _of("steps", "auto",
        "Steps in one graph call; auto (or 0) aims at half a second.")
    log_every_steps: int = _of("number", 100,
        "Steps between logs of the training metrics. 0: only at the end.")
    eval_every_steps: int = _of("number", 0,
        "Steps between evaluations. 0: at the end of a program, never in Trainer.train.")
    save_every_steps: int = _of("number", 500,
        "Steps between checkpoints, also saved before each evaluation and at the end. 0: only there.")
    evaluate_ema: bool = _of("bool", True,
        "Evaluate, predict and export with moving averages of the weights, if the optimizer has them "
        "(use_ema=True).")
    jit_compile: str | bool = _of("compile", ("off", "step", "loop"),
        "What XLA compiles: nothing; forward and backward of a step (also --jit_compile alone); or a loop "
        "as one program, on one replica, with data of ctl.from_arrays.")
    check_collectives: bool = _of("bool", False,
        "Workers compare their collectives before they run them, and name lines that differ. Slow: for "
        "debugging.")
    profile: str = _of("range", "",
        "Steps to trace into model_dir/logs for TensorBoard's profile plugin: 100:110 for the ten after "
        "step 100. Empty: none.")
    data_position: str = _of("word", ("auto", "indexed", "skip", "iterator"),
        "How a resumed run finds its position in the data: by index, skipping, or a saved iterator.")
    # Output
    keep: str = _of("text", "5",
        "Newest checkpoints to keep, optionally the best and every k-th step's: "
        "3,best=accuracy,every=1000. 0: all.")
    background_save: bool = _of("bool", False,
        "Write checkpoints during training; needs memory for another copy of the state.")
    export: str = _of("text", "keras,saved_model",
        "Formats to write into model_dir/export at the end: keras, saved_model, weights. "
        "generator:keras exports self.generator. none or 0: off.")
    report_hypertune: str = _of("text", "",
        "Metric of the evaluation, such as accuracy, to report to a tuning job on Vertex AI. Empty: none.")
    # Errors
    on_nonfinite: str = _of("word", ("stop", "skip", "rollback"),
        "If a loss or gradient is NaN or infinite: end the run, skip the step, or roll back to a "
        "checkpoint and continue with the next data.")
    step_timeout_secs: float = _of("real", 0.0,
        "Seconds without a step after which all stacks are printed and the process ends with 134; longer "
        "for compiling, evaluating and saving. 0: off.")
    startup_timeout_secs: float = _of("real", 0.0,
        "Seconds that multi_worker waits for missing workers. 0: the launcher's limit, or ten minutes.")
    allow_config_change: bool = _of("bool", False,
        "Resume although seed, batch size or data differ; the order of examples then changes.")
    full_traceback: bool = _of("bool", False,
        "Print all frames of an uncaught error; by default only those in your own files.")
    # fmt: on

    def __new__(cls, **given: Any) -> "Config":
        for name in given:
            check_name(name, "Config")
        made = object.__new__(cls)
        object.__setattr__(made, "_given", frozenset(given))
        return made

    def __post_init__(self) -> None:
        for found in dataclasses.fields(self):
            value = _checked(found, getattr(self, found.name))
            object.__setattr__(self, found.name, value)

    @property
    def given(self) -> frozenset[str]:
        """Names of the settings that were given explicitly."""
        names: frozenset[str] = getattr(self, "_given", frozenset())
        return names

    def only_given(self) -> dict[str, Any]:
        """Returns the settings that were given explicitly, by name."""
        return {name: getattr(self, name) for name in sorted(self.given)}

    def with_settings(self, **settings: Any) -> "Config":
        """Returns a copy with other explicit settings. Raises UsageError like the constructor."""
        return Config(**{**self.only_given(), **settings})


FIELDS = {found.name: found for found in dataclasses.fields(Config)}
NAMES = tuple(FIELDS)
_FIRST = {
    "mode": "What to do",
    "strategy": "Where it runs",
    "steps_per_loop": "The loop",
    "keep": "What stays",
    "on_nonfinite": "When things go wrong",
}
GROUPS: dict[str, list[str]] = {}  # title -> names
for _name in NAMES:
    GROUPS.setdefault(_FIRST.get(_name) or list(GROUPS)[-1], []).append(_name)
OF_CONSTRUCTOR = ("model_dir", "strategy", "global_batch_size", "seed")  # common arguments of subclasses
OF_RUN = (
    "mode",
    "train_steps",
    "epochs",
    "export",
    "report_hypertune",
    "full_traceback",
)  # not keywords of ctl.Trainer


def check_name(name: str, where: str) -> None:
    """Raises UsageError for an unknown setting. The message suggests the most similar name."""
    if name not in FIELDS:
        near = difflib.get_close_matches(name, NAMES, 1)
        raise UsageError(
            f"{where} got {name}=..., which is no setting. "
            + (f"Write {near[0]}=..." if near else f"Expected one of {', '.join(NAMES)}.")
        )


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Returns `value` as an int. Raises UsageError unless it is an integer from `least` to `most`."""
    try:
        good = not isinstance(value, bool) and int(value) == value and value >= least
    except (TypeError, ValueError, OverflowError):
        good = False
    if not good or (most is not None and value > most):
        limit = "" if most is None else f" and <= {most}"
        raise UsageError(f"{name} is {value!r}; expected a whole number >= {least}{limit}.")
    return int(value)


def steps_per_loop(value: int | str) -> int | str:
    """Returns a number of steps, or "auto" for "auto" and 0. Raises UsageError for other values."""
    text = str(value)
    if text in ("auto", "0"):
        return "auto"
    if isinstance(value, bool) or not text.isascii() or not text.isdigit():
        raise UsageError(f"steps_per_loop is {value!r}; expected a number of steps, or auto.")
    return int(text)


def step_range(value: str) -> tuple[int, int]:
    """Returns the numbers of "first:last", or (0, 0) for "". Raises UsageError for other values."""
    if value == "":
        return 0, 0
    first, _, last = value.partition(":") if isinstance(value, str) else ("", "", "")
    if all(n.isascii() and n.isdigit() and len(n) < 19 for n in (first, last)) and int(first) < int(last):
        return int(first), int(last)
    raise UsageError(
        f"profile is {value!r}; expected two numbers of steps, first:last, the second one larger. "
        "Write profile='100:110' for the ten steps after step 100."
    )


def jit_compile(value: str | bool) -> str:
    """Returns "off", "step" or "loop": "off" for False, "step" for True. Raises UsageError otherwise."""
    words = FIELDS["jit_compile"].metadata["words"]
    word = words[int(value)] if isinstance(value, bool) else value
    if not isinstance(word, str) or word not in words:
        raise UsageError(f"jit_compile is {value!r}; expected one of {', '.join(words)}, or True or False.")
    return word


def _checked(found: "dataclasses.Field[Any]", value: Any) -> Any:
    """Returns a value converted to the type of its field. Raises UsageError for an invalid value."""
    name, kind, words = found.name, found.metadata["kind"], found.metadata["words"]
    if kind in ("number", "positive"):
        return whole(name, value, int(kind == "positive"), 2**32 - 1 if name == "seed" else None)
    if kind == "real":
        good = (
            isinstance(value, Real) and not isinstance(value, bool) and 0.0 <= float(value) < float("inf")
        )
        expected = "a number >= 0"
    elif kind == "bool":
        good, expected = isinstance(value, bool), "True or False"
    elif kind == "list":
        value = tuple(v for v in value.split(",") if v) if isinstance(value, str) else value
        good = isinstance(value, Sequence) and all(isinstance(v, str) for v in value)
        expected = "a list of words"
    elif kind == "word":
        good = value in words if isinstance(value, str) else name == "strategy" and value is not None
        expected = f"one of {', '.join(words)}"
    elif kind in ("steps", "compile"):
        return steps_per_loop(value) if kind == "steps" else jit_compile(value)
    elif kind == "range":
        step_range(value := "" if value is None else value)
        return value
    else:
        value = "" if value is None else str(value) if isinstance(value, PathLike) else value
        good, expected = isinstance(value, str), "a text"
    if not good:
        raise UsageError(f"{name} is {value!r}; expected {expected}.")
    return {"real": float, "list": tuple}.get(kind, lambda same: same)(value)


def of_command_line(
    values: flags.FlagValues, keywords: Mapping[str, Any], trainer: Callable[..., Any]
) -> tuple[Config, dict[str, Any]]:
    """Returns the settings of the flags and of the keywords of `ctl.run`, and the remaining keywords.

    A keyword that the user's constructor defines is not a setting, unless it is in `OF_CONSTRUCTOR`.
    """
    rest = dict(keywords)
    own = _own_arguments(trainer)
    given = {}
    for name in NAMES:
        keyword = None if name in own else rest.pop(name, None)
        if values[name].present:
            given[name] = values[name].value
        elif keyword is not None:
            given[name] = keyword
    return Config(**given), rest


def settled(
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
    found = {} if config is None else config.only_given()
    for name, value in (keywords or {}).items():
        check_name(name, getattr(trainer, "__name__", "the trainer"))
        found[name] = value
    for name in NAMES:
        if name not in found and (own := _own_default(trainer, name)) is not None:
            found[name] = _checked_default(trainer, name, own)
    return Config(**found)


def _checked_default(trainer: Callable[..., Any], name: str, value: Any) -> Any:
    """Returns the validated default of a class. The attribute may have another meaning for the user."""
    try:
        return _checked(FIELDS[name], value)
    except UsageError as e:
        raise UsageError(
            f"{getattr(trainer, '__name__', 'the trainer')}.{e} {name} is a setting of ctl: give it such a "
            "value, or another name to the attribute."
        ) from None


def _own_default(trainer: Callable[..., Any], name: str) -> Any:
    """Returns the default of a setting in a class or in the signature of its constructor, or None."""
    for kind in getattr(trainer, "__mro__", ()):
        if name in vars(kind) and not kind.__module__.startswith("ctl."):
            value = vars(kind)[name]
            return None if hasattr(value, "__get__") else value  # a method or property is not a default
    found = _parameters(trainer).get(name) if name in OF_CONSTRUCTOR else None
    return None if found is None or found.default is found.empty else found.default


def as_keywords(config: Config, trainer: Callable[..., Any]) -> dict[str, Any]:
    """Returns the explicit settings as keywords, without arguments that the user's constructor defines."""
    left_out = {*OF_RUN, *_own_arguments(trainer)}
    return {name: value for name, value in config.only_given().items() if name not in left_out}


def _own_arguments(trainer: Callable[..., Any]) -> set[str]:
    """Returns the arguments that the user's constructor defines, except those in `OF_CONSTRUCTOR`."""
    return set(_parameters(trainer)) - set(OF_CONSTRUCTOR)


def _parameters(trainer: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a function, or of the constructors that a class and its bases define."""
    own = [c for c in getattr(trainer, "__mro__", ()) if not c.__module__.startswith("ctl.")]
    calls = [vars(kind)["__init__"] for kind in own if "__init__" in vars(kind)]
    found: dict[str, inspect.Parameter] = {}
    for call in calls if isinstance(trainer, type) else [trainer]:
        with contextlib.suppress(TypeError, ValueError):
            found = {**inspect.signature(call).parameters, **found}
    return found


def signature(constructor: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a constructor with all settings in place of `**settings`, for help()."""
    kinds = inspect.Parameter
    settings = [
        kinds(name, kinds.KEYWORD_ONLY, default=found.default, annotation=found.type)
        for name, found in FIELDS.items()
        if name not in OF_RUN
    ]
    named = [p for p in inspect.signature(constructor).parameters.values() if p.kind != kinds.VAR_KEYWORD]
    return inspect.Signature([*named, *settings])
