"""The settings of every `ctl` binary, each once: flags, --help and docs/flags.md are made from this table.

A flag that is given on the command line comes first; then a keyword of `ctl.run` or of the constructor;
then a default of the class; then the default of this table.
"""

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from absl import flags


class Setting(NamedTuple):
    """One row.

    Attributes:
      kind: "text", "bool", "list", "word" (one of `default`, whose first is the default), "real" (>= 0),
        "number" (whole, >= 0) or "positive" (whole, >= 1).
      help: one sentence with the unit, and what 0 or nothing means.
    """

    kind: str
    name: str
    default: Any
    help: str


SETTINGS: dict[str, tuple[Setting, ...]] = {
    "What to do": (
        Setting("word", "mode", ("train_and_eval", "train", "eval", "export", "predict"),
                "What to do; predict prints a line of JSON per example."),
        Setting("text", "model_dir", "",
                "Directory where the run lives: checkpoints, logs, export. Given again, the run "
                "resumes. Empty: as AIP_CHECKPOINT_DIR says on Vertex AI, else nothing is kept."),
        Setting("number", "train_steps", 1000,
                "Steps to complete in all, resumed ones included. 0 turns it off: train until the "
                "data ends."),
        Setting("real", "epochs", 0.0,
                "Passes over the training data in all, instead of --train_steps. 0 turns it off."),
        Setting("positive", "global_batch_size", 128,
                "Examples in one step, over all replicas of all workers."),
        Setting("number", "seed", 0,
                "Seed of everything random, the same on every worker."),
        Setting("text", "init_from", "",
                "Checkpoint, or model_dir of another run, whose model variables to begin with where "
                "model_dir has no checkpoint. Empty: as the model is built."),
    ),
    "Where it runs": (
        Setting("word", "strategy",
                ("auto", "default", "one_device", "mirrored", "multi_worker", "parameter_server",
                 "central_storage", "tpu"),
                "How to distribute; auto looks at TF_CONFIG and the devices."),
        Setting("list", "devices", [],
                "Devices for one_device and mirrored, such as cpu:0,cpu:1. Empty: the strategy's own "
                "choice."),
        Setting("number", "num_virtual_devices", 0,
                "Logical devices to split the CPU into, to try several replicas. 0 turns it off."),
        Setting("word", "cross_device_ops",
                ("auto", "nccl", "hierarchical_copy", "reduction_to_one_device"),
                "How mirrored adds gradients up."),
        Setting("word", "communication", ("auto", "ring", "nccl"),
                "How multi_worker adds gradients up."),
        Setting("real", "collective_timeout_secs", 0.0,
                "Seconds that multi_worker waits in one sum over workers. 0 turns it off: as long as "
                "the others live."),
        Setting("real", "heartbeat_secs", 0.0,
                "Seconds of silence after which multi_worker gives a worker up. 0 leaves it to "
                "TensorFlow."),
        Setting("text", "tpu", "",
                "Name or address of the TPU for --strategy=tpu. Empty: the one of this environment."),
        Setting("text", "variable_partitioner", "",
                "How parameter servers share large variables: min_size:256K, max_shards:2 or "
                "fixed_shards:2. Empty: each variable stays whole."),
    ),
    "The loop": (
        Setting("text", "steps_per_loop", "auto",
                "Steps in one graph call, or auto for about half a second. 0 means auto."),
        Setting("number", "log_every_steps", 100,
                "Steps between reports of the training numbers. 0 turns it off: only at the end."),
        Setting("number", "eval_every_steps", 0,
                "Steps between evaluations. 0 turns it off: only at the end."),
        Setting("number", "save_every_steps", 500,
                "Steps between checkpoints; one is also saved before each evaluation. 0 turns it off: "
                "only there and at the end."),
        Setting("bool", "jit_compile", False,
                "Compile forward and backward of the step with XLA."),
        Setting("bool", "check_collectives", False,
                "Have workers compare what they are about to sum, and name the line that breaks their "
                "order. Slow: for debugging."),
    ),
    "What stays": (
        Setting("text", "keep", "5",
                "Newest checkpoints to keep, optionally with the best and every k-th step's: "
                "3,best=accuracy,every=1000. 0 turns deletion off: keep all."),
        Setting("bool", "background_save", False,
                "Write checkpoints while training goes on; takes memory for one more copy of the "
                "state."),
        Setting("text", "export", "keras,saved_model",
                "Formats to write into model_dir/export at the end, of keras, saved_model, weights. "
                "none (or 0) turns it off."),
        Setting("text", "report_hypertune", "",
                "Metric of the evaluation to report to a hyperparameter tuning job on Vertex AI, such "
                "as accuracy. Empty: none."),
    ),
    "When things go wrong": (
        Setting("word", "on_nonfinite", ("stop", "skip", "rollback"),
                "What a loss or gradient that is NaN or infinite does: end the run, leave the step "
                "out, or go back to a checkpoint, past those data."),
        Setting("real", "step_timeout_secs", 0.0,
                "Seconds without a step after which all stacks are printed and the process ends with "
                "134; compiling, evaluating and saving have longer limits. 0 turns it off."),
        Setting("real", "startup_timeout_secs", 0.0,
                "Seconds that multi_worker waits for workers that do not come. 0 leaves it to the "
                "launcher, or ten minutes."),
        Setting("bool", "allow_config_change", False,
                "Go on in a model_dir although the seed, the batch size or the data are others than "
                "before: examples come in another order then."),
    ),
}  # fmt: skip
ALL = tuple(setting for group in SETTINGS.values() for setting in group)
NAMES = tuple(setting.name for setting in ALL)
OF_CONSTRUCTOR = ("model_dir", "strategy", "global_batch_size", "seed")  # keywords of ctl.Trainer
OF_TRAINER = (
    *OF_CONSTRUCTOR,
    "init_from",
    "jit_compile",
    "check_collectives",
    "step_timeout_secs",
    "allow_config_change",
)


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags of every `ctl` binary; a frozen list, see docs/flags.md."""
    where: dict[str, Any] = {"flag_values": values, "module_name": "ctl.app"}
    for kind, name, default, text in ALL:
        if kind == "word":
            flags.DEFINE_enum(name, default[0], default, text, **where)
        elif kind == "text":
            flags.DEFINE_string(name, default, text, **where)
        elif kind == "bool":
            flags.DEFINE_bool(name, default, text, **where)
        elif kind == "list":
            flags.DEFINE_list(name, default, text, **where)
        elif kind == "real":
            flags.DEFINE_float(name, default, text, lower_bound=0.0, **where)
        else:
            least = 1 if kind == "positive" else 0
            flags.DEFINE_integer(name, default, text, lower_bound=least, **where)


def settle(
    values: flags.FlagValues, keywords: Mapping[str, Any], trainer: Callable[..., Any]
) -> dict[str, Any]:
    """Gives the flags that are not on the command line the values that come next in precedence.

    Args:
      keywords: of `ctl.run`; trainer: the class, or a function, that is called with them.

    Returns the keywords that are no settings of this table.
    """
    rest = dict(keywords)
    for name in OF_TRAINER:
        if name not in OF_CONSTRUCTOR and name in _parameters(trainer):
            continue  # the person's own
        keyword, flag = rest.pop(name, None), values[name]
        if flag.present:
            continue
        if keyword is not None:
            flag.value, flag.using_default_value = keyword, False
        elif (own := _own_default(trainer, name)) is not None:
            flag.value = own
    return rest


def _own_default(trainer: Callable[..., Any], name: str) -> Any:
    """What a class, or the signature of its constructor, has in place of the table's default, or None."""
    for kind in getattr(trainer, "__mro__", ()):
        if name in vars(kind) and not kind.__module__.startswith("ctl."):
            value = vars(kind)[name]
            return None if hasattr(value, "__get__") else value  # a property is no default
    found = _parameters(trainer).get(name)
    return None if found is None or found.default is found.empty else found.default


def _parameters(trainer: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Those that a class's own constructors, or a function, name."""
    own = [c for c in getattr(trainer, "__mro__", ()) if not c.__module__.startswith("ctl.")]
    calls = [vars(kind)["__init__"] for kind in own if "__init__" in vars(kind)]
    found: dict[str, inspect.Parameter] = {}
    for call in calls if isinstance(trainer, type) else [trainer]:
        with contextlib.suppress(TypeError, ValueError):
            found = {**inspect.signature(call).parameters, **found}
    return found


def help_text(values: flags.FlagValues, program: str) -> str:
    """All flags, grouped, each with its unit, default and choices."""
    own = set(NAMES)
    by_module = values.flags_by_module_dict()
    main = by_module.get(sys.argv[0], []) + by_module.get(program, [])
    groups: dict[str, list[str]] = {}
    mine = sorted({f.name for f in main if f.name not in own})
    if mine:
        groups["The model"] = mine
    groups |= {title: [s.name for s in group] for title, group in SETTINGS.items()}
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    command = f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {program}"
    lines = [f"usage: {command} [--name=value ...]", "", "Every flag has the form --name=value."]
    for title, names in groups.items():
        lines += ["", f"{title}:"]
        for name in names:
            flag = values[name]
            lines.append(f"  --{name}={describe_default(flag)}")
            lines.append(
                textwrap.fill(description(flag), 96, initial_indent="      ", subsequent_indent="      ")
            )
    lines += ["", "--helpfull lists the flags of every library as well."]
    return "\n".join(lines)


def description(flag: flags.Flag) -> str:
    """The help of a flag, with its choices."""
    choices = flag.parser.enum_values if isinstance(flag, flags.EnumFlag) else ()
    help_line = " ".join((flag.help or "").split())
    prefix = f"<{'|'.join(choices)}>: "
    if choices and help_line.startswith(prefix):
        help_line = help_line[len(prefix) :]
    return f"{help_line} One of {', '.join(choices)}." if choices else help_line


def describe_default(flag: flags.Flag) -> str:
    """The default as one would write it."""
    value = flag.default
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "" if value is None else str(value)
