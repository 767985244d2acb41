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
_TITLES = {"accepted": "accepted, nothing to do", "meaningless": "accepted; they change nothing here"}
report = functools.partial(console.print_message, program="ctlrun")  # one line on stderr


@dataclass(frozen=True)
class Flag:
    """One option.

    Attributes:
      names: Spellings on the command line, such as "-np --num-proc".
      key: Key of its value in `Options`.
      about: Help text.
      takes: Converter of each following argument. None for a switch.
      metavar: Names of the following arguments.
      sets: Value that a switch sets.
      adds: If True, a repeated option is appended to the previous value.
    """

    names: str
    key: str
    about: str = ""
    takes: Convert | None = None
    metavar: str = ""
    sets: bool = True
    adds: bool = False


def _ignored(names: str, takes: Convert) -> Flag:
    return Flag(names, names.strip("-").replace("-", "_"), "", takes, "X")


def _switch(name: str) -> tuple[Flag, Flag]:
    key = name.replace("-", "_")
    return Flag(f"--{name}", key), Flag(f"--no-{name}", key, sets=False)


OPTION_GROUPS: dict[str, tuple[Flag, ...]] = {
    "the job": (
        Flag("-np --num-proc", "num_proc", "how many processes; elastic: how many before it begins",
             whole_number(1, 1024), "N"),
        Flag("-H --hosts", "hosts", "machines and how many processes each takes (default: this one)",
             text, "HOST:N,..."),
        Flag("-hostfile --hostfile", "hostfile", "the same in a file, a line `HOST slots=N` for each",
             text, "FILE"),
        Flag("--as-horovod", "as_horovod", "for programs that import horovod or perseus, unchanged: they "
             "get ctl.hvd under these names (perseusrun always does this)"),
        Flag("--bind_gpus", "bind_gpus", "each process sees one GPU, that of its local rank"),
        Flag("--config-file", "config_file", "YAML with further options; those given here win",
             text, "FILE"),
        Flag("--heartbeat-timeout", "heartbeat_timeout_secs", "seconds without a sign of life until a "
             "rank of this machine is killed; 0 is never (default: 60)", whole_number(0), "SECS"),
        Flag("--start-timeout", "start_timeout", "seconds for all processes to find each other "
             "(default: HOROVOD_START_TIMEOUT, or 300)", whole_number(1), "SECS"),
    ),
    "several machines": (
        Flag("-p --ssh-port", "ssh_port", "the port of ssh", whole_number(1, 65535), "PORT"),
        Flag("-i --ssh-identity-file", "ssh_identity_file", "the private key of ssh", text, "FILE"),
        Flag("--network-interfaces --network-interface", "nics", "names, with commas, of the network "
             "interfaces to use; the first one's address is this machine's", text, "NAMES",
             adds=True),
    ),
    "output": (
        Flag("--output-filename", "output_filename",
             "also write to DIR/rank.0/stdout, DIR/rank.0/stderr, ...", text, "DIR"),
        Flag("-prefix-timestamp --prefix-output-with-timestamp", "prefix_timestamp",
             "begin each line with the time"),
        Flag("--verbose", "verbose", "say what is started, and where"),
    ),
    "elastic": (
        Flag("--min-np --min-num-proc", "min_num_proc", "go on with so many (default: that of -np)",
             whole_number(1, 1024), "N"),
        Flag("--max-np --max-num-proc", "max_num_proc", "never more (default: all slots there are)",
             whole_number(1, 1024), "N"),
        Flag("--host-discovery-script", "host_discovery_script",
             "a program that prints a line HOST:N, or HOST, for each machine there is", text, "FILE"),
        Flag("--slots-per-host", "slots", "of a machine named without a number (default: 1)",
             whole_number(1, 1024), "N"),
        Flag("--elastic-timeout", "elastic_timeout", "seconds to wait for enough processes (default: "
             "HOROVOD_ELASTIC_TIMEOUT, or 600)", whole_number(1), "SECS"),
        Flag("--reset-limit", "reset_limit", "how often the set of processes may change (default: any)",
             whole_number(0), "N"),
        Flag("--blacklist-cooldown-range", "cooldown", "seconds, least and most, before a machine on "
             "which a process failed is used again", whole_number(1), "SECS SECS"),
    ),
    "collectives": (
        Flag("--fusion-threshold-mb", "fusion_threshold_mb", "tensors up to so many MiB travel together",
             whole_number(0), "MIB"),
        Flag("--cycle-time-ms", "cycle_time_ms", "for so long small requests of a function wait for others",
             _number, "MS"),
        Flag("--timeline-filename", "timeline_filename", "write what happened when, for "
             "chrome://tracing", text, "FILE"),
        Flag("--timeline-mark-cycles", "timeline_mark_cycles", "with a mark for each cycle"),
        Flag("--no-timeline-mark-cycles", "timeline_mark_cycles", "without", sets=False),
        Flag("--no-stall-check", "no_stall_check", "no warning when a rank does not come"),
        Flag("--stall-check", "no_stall_check", "with it, the default", sets=False),
        Flag("--stall-check-warning-time-seconds", "stall_warning_secs",
             "seconds before the warning (default: 60)", whole_number(0), "SECS"),
        Flag("--stall-check-shutdown-time-seconds", "stall_shutdown_secs",
             "seconds before an error; 0 is never (default: 0)", whole_number(0), "SECS"),
    ),
    "about": (
        Flag("-v --version", "version", "show the version"),
        Flag("-cb --check-build", "check_build", "show what collectives work with here"),
        Flag("-h --help", "help", "show this text"),
    ),
    "accepted": (
        Flag("--gloo", "use_gloo", "TCP without MPI, which is what there is"),
        Flag("--disable-cache", "disable_cache", "nothing is checked in advance, so nothing is cached"),
        Flag("--mpi", "use_mpi", "refused: there is no MPI"),
        Flag("--jsrun", "use_jsrun", "refused: there is no MPI"),
    ),
    "meaningless": (
        _ignored("--cache-capacity", whole_number(0)),
        _ignored("--log-level", one_of(*LEVELS)),
        Flag("--log-with-timestamp --no-log-hide-timestamp", "log_with_timestamp"),
        Flag("--log-without-timestamp --log-hide-timestamp", "log_with_timestamp", sets=False),
        *_switch("hierarchical-allreduce"), *_switch("hierarchical-allgather"),
        *_switch("torus-allreduce"), *_switch("autotune"),
        _ignored("--autotune-log-file", text), _ignored("--autotune-warmup-samples", whole_number(0)),
        _ignored("--autotune-steps-per-sample", whole_number(0)),
        _ignored("--autotune-bayes-opt-max-samples", whole_number(0)),
        _ignored("--autotune-gaussian-process-noise", _number),
        *_switch("mpi-threads-disable"), _ignored("--mpi-args", text), Flag("--tcp", "tcp_flag"),
        _ignored("--binding-args", text), _ignored("--num-nccl-streams", whole_number(0)),
        _ignored("--thread-affinity", whole_number(0)), _ignored("--gloo-timeout-seconds", whole_number(0)),
    ),
}  # fmt: skip
FLAGS = {name: flag for group in OPTION_GROUPS.values() for flag in group for name in flag.names.split()}
_SHORT = tuple(name for name in FLAGS if len(name) == 2)  # the value may follow directly, as in -p2222


def no_options() -> dict[str, Any]:
    """Returns the options of an empty command line."""
    return dict.fromkeys(flag.key for flag in FLAGS.values())


def parse_ctlrun(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the options and the command. Raises UsageError that names the invalid argument."""
    options, words = no_options(), list(argv)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        flag, name, values = _match(word)
        if flag.takes is None and values:
            raise UsageError(f"{name} takes no value, but came with {quoted(values[0])}; {_HELP}")
        while len(values) < len(flag.metavar.split()):
            if not words:
                raise UsageError(f"{name} came last; expected {flag.metavar} after it, {_HELP}")
            values.append(words.pop(0))
        put_option(options, flag, name, values)
    return options, words


def put_option(options: dict[str, Any], flag: Flag, name: str, values: list[Any]) -> None:
    """Sets an option. Raises UsageError for an invalid value."""
    if flag.takes is None:
        options[flag.key] = flag.sets
        return
    try:
        converted = [flag.takes(value) for value in values]
    except ValueError as e:
        came = " ".join(map(str, values))
        raise UsageError(f"{name} came with {quoted(came)}; {e}, as in {name} {flag.metavar}") from None
    value = converted[0] if len(converted) == 1 else tuple(converted)
    before = options[flag.key]
    options[flag.key] = f"{before},{value}" if flag.adds and before else value


def meaningless(options: Options) -> list[str]:
    """Returns the first names of the given options that have no effect."""
    firsts = {f.key: f.names.split()[0] for f in reversed(OPTION_GROUPS["meaningless"])}
    return [name for key, name in firsts.items() if options[key] is not None][::-1]


def ctlrun_help() -> str:
    """Returns the text of --help."""
    lines = ["usage: ctlrun [options] command [its options]", ""]
    lines += ["Runs a command once per rank, for scripts with `import ctl.hvd as hvd`.", ""]
    for title, group in OPTION_GROUPS.items():
        lines.append(f"{_TITLES.get(title, title)}:")
        if title == "meaningless":
            lines += [*(f"  {flag.names}" for flag in group), ""]
            continue
        for flag in group:
            lines.append(f"  {', '.join(flag.names.split())} {flag.metavar}".rstrip())
            lines.append(f"      {flag.about}")
        lines.append("")
    return "\n".join([*lines, f"example:\n  {CTLRUN_EXAMPLE}"])


def _match(word: str) -> tuple[Flag, str, list[str]]:
    """Returns the option and the value in one argument, as in --num-proc=2 or -p2222."""
    name, equals, value = word.partition("=")
    if name in FLAGS:
        return FLAGS[name], name, [value] if equals else []
    short = next((s for s in _SHORT if word.startswith(s) and FLAGS[s].takes), None)
    if short and not word.startswith("--") and not _looks_long(word):
        return FLAGS[short], short, [word[2:]]
    near = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.5)
    cure = f"did you mean {near[0]}?" if near else "its name is not near any."
    raise UsageError(
        f"{quoted(word)} is no option of ctlrun; {cure} Options of the script come after it: "
        f"{CTLRUN_EXAMPLE}"
    )


def _looks_long(word: str) -> bool:
    """Returns True for a misspelt -hostfil or -prefix-stamp, False for -p with a value."""
    return not (word.startswith("-p") and word[2:].isdigit()) and not word.startswith(("-H", "-i"))
