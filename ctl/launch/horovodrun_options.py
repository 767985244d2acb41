"""Options of `ctlrun`: the options of horovodrun under the same names, and additional ones.

    options, command = parse_ctlrun(["-np", "2", "python", "train.py", "--verbose"])
    options["num_proc"], options["verbose"]      -> 2, None

Options end at the first argument that is not an option, because the command has its own options.
Options without an effect are accepted, so a command line of horovodrun runs unchanged. They are named once
on stderr.
"""

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctl.errors import UsageError
from ctl.io import console
from ctl.io.console import quoted
from ctl.launch.option_values import Convert, number_in, one_of, text, whole_number

CTLRUN_EXAMPLE = "ctlrun -np 2 -H localhost:2 python train.py"
_number = number_in(lambda value: 0 <= value < 1e9, "a number from 0")
LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
Options = Mapping[str, Any]  # key -> value, None if not set
_HELP = "see `ctlrun --help`"
_TITLES = {"accepted": "accepted", "ignored": "accepted without effect"}
report = functools.partial(console.print_message, program="ctlrun")  # one line on stderr


@dataclass(frozen=True)
class Flag:
    """One option.

    Attributes:
      names: Spellings on the command line, such as "-np --num-proc".
      key: Key of its value in `Options`.
      help: Help text.
      converter: Converter of each following argument. None for a switch.
      metavar: Names of the following arguments.
      switch_value: Value that a switch sets.
      is_repeatable: If True, a repeated option is appended to the previous value.
    """

    names: str
    key: str
    help: str = ""
    converter: Convert | None = None
    metavar: str = ""
    switch_value: bool = True
    is_repeatable: bool = False


def _ignored_flag(names: str, converter: Convert) -> Flag:
    return Flag(names, names.strip("-").replace("-", "_"), "", converter, "X")


def _switch(name: str) -> tuple[Flag, Flag]:
    key = name.replace("-", "_")
    return Flag(f"--{name}", key), Flag(f"--no-{name}", key, switch_value=False)


OPTION_GROUPS: dict[str, tuple[Flag, ...]] = {
    "the job": (
        Flag("-np --num-proc", "num_proc", "number of processes; of an elastic job: initial number",
             whole_number(1, 1024), "N"),
        Flag("-H --hosts", "hosts", "machines with their numbers of processes (default: this machine)",
             text, "HOST:N,..."),
        Flag("-hostfile --hostfile", "hostfile", "file with a line `HOST slots=N` for each machine",
             text, "FILE"),
        Flag("--as-horovod", "as_horovod", "for unchanged programs that import horovod or perseus: "
             "provides ctl.hvd under these names (perseusrun implies this option)"),
        Flag("--bind_gpus", "bind_gpus", "restrict each process to the GPU of its local rank"),
        Flag("--config-file", "config_file", "YAML file with options; the command line has priority",
             text, "FILE"),
        Flag("--heartbeat-timeout", "heartbeat_timeout_secs", "seconds without a heartbeat until a "
             "rank of this machine is killed; 0 disables the check (default: 60)", whole_number(0), "SECS"),
        Flag("--start-timeout", "start_timeout", "seconds for all processes to connect to each "
             "other (default: HOROVOD_START_TIMEOUT, or 300)", whole_number(1), "SECS"),
    ),
    "several machines": (
        Flag("-p --ssh-port", "ssh_port", "port for ssh", whole_number(1, 65535), "PORT"),
        Flag("-i --ssh-identity-file", "ssh_identity_file", "private key for ssh", text, "FILE"),
        Flag("--network-interfaces --network-interface", "nics", "comma-separated network "
             "interfaces; the address of the first one is used for this machine", text, "NAMES",
             is_repeatable=True),
    ),
    "output": (
        Flag("--output-filename", "output_filename",
             "also write to DIR/rank.0/stdout, DIR/rank.0/stderr, ...", text, "DIR"),
        Flag("-prefix-timestamp --prefix-output-with-timestamp", "prefix_timestamp",
             "prefix each line with the time"),
        Flag("--verbose", "verbose", "log each started process and its host"),
    ),
    "elastic": (
        Flag("--min-np --min-num-proc", "min_num_proc",
             "minimum number of processes to continue (default: that of -np)", whole_number(1, 1024), "N"),
        Flag("--max-np --max-num-proc", "max_num_proc", "maximum number of processes (default: all slots)",
             whole_number(1, 1024), "N"),
        Flag("--host-discovery-script", "host_discovery_script",
             "a program that prints a line HOST:N or HOST for each available machine", text, "FILE"),
        Flag("--slots-per-host", "slots", "slots of a machine without a number (default: 1)",
             whole_number(1, 1024), "N"),
        Flag("--elastic-timeout", "elastic_timeout", "seconds to wait for enough processes (default: "
             "HOROVOD_ELASTIC_TIMEOUT, or 600)", whole_number(1), "SECS"),
        Flag("--reset-limit", "reset_limit",
             "maximum number of changes of the set of processes (default: no limit)", whole_number(0), "N"),
        Flag("--blacklist-cooldown-range", "cooldown", "minimum and maximum delay before a machine with "
             "a failed process is used again", whole_number(1), "SECS SECS"),
    ),
    "collectives": (
        Flag("--mpi", "use_mpi", "start the ranks with mpirun; collectives over MPI (mpi4py)"),
        Flag("--mpi-args", "mpi_args", "with --mpi: further arguments of mpirun", text, "ARGS"),
        Flag("--fusion-threshold-mb", "fusion_threshold_mb", "maximum size of a fused message",
             whole_number(0), "MIB"),
        Flag("--cycle-time-ms", "cycle_time_ms",
             "time that a small request waits for others to be fused with", _number, "MS"),
        Flag("--timeline-filename", "timeline_filename", "write a trace of the collectives for "
             "chrome://tracing", text, "FILE"),
        Flag("--timeline-mark-cycles", "timeline_mark_cycles", "add a mark for each cycle to the trace"),
        Flag("--no-timeline-mark-cycles", "timeline_mark_cycles", "no marks (default)", switch_value=False),
        Flag("--no-stall-check", "no_stall_check",
             "disable the warning about ranks that have not submitted a tensor"),
        Flag("--stall-check", "no_stall_check", "enable the warning (default)", switch_value=False),
        Flag("--stall-check-warning-time-seconds", "stall_warning_secs",
             "seconds before the warning (default: 60)", whole_number(0), "SECS"),
        Flag("--stall-check-shutdown-time-seconds", "stall_shutdown_secs",
             "seconds before an error; 0 disables it (default: 0)", whole_number(0), "SECS"),
    ),
    "about": (
        Flag("-v --version", "version", "show the version"),
        Flag("-cb --check-build", "check_build", "show the available frameworks and collectives"),
        Flag("-h --help", "help", "show this text"),
    ),
    "accepted": (
        Flag("--gloo", "use_gloo", "collectives over TCP (default)"),
        Flag("--disable-cache", "disable_cache", "no effect: there is no response cache"),
        Flag("--jsrun", "use_jsrun", "not supported"),
    ),
    "ignored": (
        _ignored_flag("--cache-capacity", whole_number(0)),
        _ignored_flag("--log-level", one_of(*LEVELS)),
        Flag("--log-with-timestamp --no-log-hide-timestamp", "log_with_timestamp"),
        Flag("--log-without-timestamp --log-hide-timestamp", "log_with_timestamp", switch_value=False),
        *_switch("hierarchical-allreduce"), *_switch("hierarchical-allgather"),
        *_switch("torus-allreduce"), *_switch("autotune"),
        _ignored_flag("--autotune-log-file", text),
        _ignored_flag("--autotune-warmup-samples", whole_number(0)),
        _ignored_flag("--autotune-steps-per-sample", whole_number(0)),
        _ignored_flag("--autotune-bayes-opt-max-samples", whole_number(0)),
        _ignored_flag("--autotune-gaussian-process-noise", _number),
        *_switch("mpi-threads-disable"), Flag("--tcp", "tcp_flag"),
        _ignored_flag("--binding-args", text), _ignored_flag("--num-nccl-streams", whole_number(0)),
        _ignored_flag("--thread-affinity", whole_number(0)),
        _ignored_flag("--gloo-timeout-seconds", whole_number(0)),
    ),
}  # fmt: skip
FLAGS = {name: flag for group in OPTION_GROUPS.values() for flag in group for name in flag.names.split()}
_SHORT_NAMES = tuple(
    name for name in FLAGS if len(name) == 2
)  # the value may follow directly, as in -p2222


def no_options() -> dict[str, Any]:
    """Returns the options of an empty command line."""
    return dict.fromkeys(flag.key for flag in FLAGS.values())


def parse_ctlrun(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the options and the command. Raises UsageError that names the invalid argument."""
    options, remaining = no_options(), list(arguments)
    while remaining and remaining[0].startswith("-"):
        argument = remaining.pop(0)
        if argument == "--":
            break
        flag, name, values = _match_argument(argument)
        if flag.converter is None and values:
            raise UsageError(f"{name} takes no value, but received {quoted(values[0])}; {_HELP}")
        while len(values) < len(flag.metavar.split()):
            if not remaining:
                raise UsageError(f"{name} requires {flag.metavar} after it; {_HELP}")
            values.append(remaining.pop(0))
        put_option(options, flag, name, values)
    return options, remaining


def put_option(options: dict[str, Any], flag: Flag, name: str, values: list[Any]) -> None:
    """Sets an option. Raises UsageError for an invalid value."""
    if flag.converter is None:
        options[flag.key] = flag.switch_value
        return
    try:
        converted = [flag.converter(value) for value in values]
    except ValueError as e:
        received = " ".join(map(str, values))
        raise UsageError(f"{name} received {quoted(received)}; {e}, as in {name} {flag.metavar}") from None
    value = converted[0] if len(converted) == 1 else tuple(converted)
    previous = options[flag.key]
    options[flag.key] = f"{previous},{value}" if flag.is_repeatable and previous else value


def ignored_option_names(options: Options) -> list[str]:
    """Returns the names of the given options that have no effect."""
    first_names = {f.key: f.names.split()[0] for f in reversed(OPTION_GROUPS["ignored"])}
    return [name for key, name in first_names.items() if options[key] is not None][::-1]


def ctlrun_help() -> str:
    """Returns the text of --help."""
    lines = ["usage: ctlrun [options] command [its options]", ""]
    lines += ["Runs a command once per rank, for scripts with `import ctl.hvd as hvd`.", ""]
    for title, group in OPTION_GROUPS.items():
        lines.append(f"{_TITLES.get(title, title)}:")
        if title == "ignored":
            lines += [*(f"  {flag.names}" for flag in group), ""]
            continue
        for flag in group:
            lines.append(f"  {', '.join(flag.names.split())} {flag.metavar}".rstrip())
            lines.append(f"      {flag.help}")
        lines.append("")
    return "\n".join([*lines, f"example:\n  {CTLRUN_EXAMPLE}"])


def _match_argument(argument: str) -> tuple[Flag, str, list[str]]:
    """Returns the option and the value in one argument, as in --num-proc=2 or -p2222."""
    name, equals, value = argument.partition("=")
    if name in FLAGS:
        return FLAGS[name], name, [value] if equals else []
    short_option = next((s for s in _SHORT_NAMES if argument.startswith(s) and FLAGS[s].converter), None)
    if short_option and not argument.startswith("--") and not _is_misspelt_long_option(argument):
        return FLAGS[short_option], short_option, [argument[2:]]
    similar = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.5)
    fix = f"did you mean {similar[0]}?" if similar else "see `ctlrun --help`."
    raise UsageError(
        f"{quoted(argument)} is not an option of ctlrun; {fix} Options of the script follow the script: "
        f"{CTLRUN_EXAMPLE}"
    )


def _is_misspelt_long_option(argument: str) -> bool:
    """Returns True for a misspelt -hostfil or -prefix-stamp, False for -p with a value."""
    return not (argument.startswith("-p") and argument[2:].isdigit()) and not argument.startswith(
        ("-H", "-i")
    )
