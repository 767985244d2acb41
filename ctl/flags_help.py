"""The text of --help, and the table of docs/flags.md: the model's flags first, then those of `ctl`."""

import sys
import textwrap

from absl import flags

GROUPS = {
    "What to do": ("mode", "model_dir", "train_steps", "epochs", "global_batch_size", "seed", "init_from"),
    "Where it runs": (
        "strategy",
        "devices",
        "num_virtual_devices",
        "cross_device_ops",
        "communication",
        "collective_timeout_secs",
        "heartbeat_secs",
        "tpu",
        "variable_partitioner",
    ),
    "The loop": (
        "steps_per_loop",
        "log_every_steps",
        "eval_every_steps",
        "save_every_steps",
        "jit_compile",
        "check_collectives",
    ),
    "What stays": ("keep", "background_save", "export", "report_hypertune"),
    "When things go wrong": (
        "on_nonfinite",
        "step_timeout_secs",
        "startup_timeout_secs",
        "allow_config_change",
    ),
}


def help_text(values: flags.FlagValues, program: str) -> str:
    """All flags, grouped, each with its unit, default and choices."""
    own = {n for names in GROUPS.values() for n in names}
    by_module = values.flags_by_module_dict()
    main = by_module.get(sys.argv[0], []) + by_module.get(program, [])
    groups: dict[str, list[str]] = {}
    mine = sorted({f.name for f in main if f.name not in own})
    if mine:
        groups["The model"] = mine
    groups |= {title: list(names) for title, names in GROUPS.items()}
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
