"""Batch scripts for Slurm that start one task per machine or per GPU with srun: `ctl deploy slurm`.

Near the time limit Slurm signals the script, every task saves a checkpoint, and the script requeues the
job, which resumes. The script does not wait for tasks that ignore the signal. After the loss of a worker it
restarts all tasks. An error that a restart cannot correct ends the job. If a machine is dead when srun
starts the tasks, the script retries until Slurm replaces the machine.

With --elastic the script starts `ctl launch --workers=MIN:MAX` on the first machine instead of srun.
"""

import argparse
import re
import shlex
from collections.abc import Sequence

from ctl.deploy import args, manifest, output, validators
from ctl.deploy.args import CommandLine, Option
from ctl.deploy.output import Advice
from ctl.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, UsageError
from ctl.launch.progress import local_model_dir
from ctl.launch.restart_policy import STUCK_ATTEMPTS
from ctl.setting_values import parse_worker_range

_EXAMPLE = (
    "ctl deploy slurm --nodes=2 --time=04:00:00 --output=flowers.sbatch -- "
    "python -m models.flowers --data_dir=/shared/flower_photos --model_dir=/shared/runs/flowers"
)
_TIME = re.compile(r"(?:(?P<d>[0-9]{1,3})-)?(?P<h>[0-9]{1,3}):(?P<m>[0-5][0-9]):(?P<s>[0-5][0-9])")
_NOT_STARTED_CODES = (126, 127)  # exit codes of a shell: the program cannot be executed, or does not exist
_TRAINED_SECS = 600  # if checkpoints are not readable, an attempt of this duration counts as progress
_SIGNAL_EARLY_SECS = 60  # Slurm may send the signal this much before the requested time
_LEAST_TRAINING_SECS = 60
_REQUEUE_SECS = 15  # before the time limit, at most: running tasks are ended, and the job is requeued
_MACHINE_SECS = 60  # after SlurmdTimeout, until Slurm has requeued the job of a dead machine
_RETRY_SECS = 10
_ARRAY_TASK = re.compile(r"(\$(?:SLURM_ARRAY_TASK_ID(?![A-Za-z0-9_])|\{SLURM_ARRAY_TASK_ID\}))")


def write(line: CommandLine) -> None:
    """Writes the script."""
    _check_options(line)
    advice = _advice(line)
    output.deliver_manifest(
        line, render_script(line, advice.fill_in), advice, f"{line.options.name}.sbatch"
    )


def parser() -> args.Parser:
    """Returns the parser of the options of `ctl deploy slurm`."""
    argument_parser = args.Parser("slurm", "Writes a batch script for Slurm.", _EXAMPLE)
    integer, pattern = validators.integer_option, validators.pattern_option
    size = pattern("[1-9][0-9]{0,6}[KMGT]?", "not a size; expected e.g. 32G")
    time = pattern(_TIME.pattern, "not a time limit; expected e.g. 04:00:00 or 2-12:00:00")
    name = pattern("[A-Za-z0-9][A-Za-z0-9_.,:+-]{0,99}", "not a name; expected letters, digits, - and _")
    module = pattern("[A-Za-z0-9][A-Za-z0-9_./+-]{0,99}", "not a module; expected a name such as cuda/12.4")
    path = pattern(r"[^\s'\"\\$`;&|<>*?]+", "not a path; expected a path without spaces or quotes")
    task = pattern("node|gpu", "an invalid choice; expected node or gpu")
    argument_parser.add(
        "size",
        Option("--nodes", "number of machines", "N", integer(1, 10_000), 1),
        Option(
            "--task_per",
            "start one process per node, with all its GPUs, or one per gpu",
            "UNIT",
            task,
            "node",
        ),
        Option("--gpus_per_node", "GPUs per machine (default: 0)", "N", integer(0), 0),
        Option("--cpus_per_task", "CPUs per task (default: that of Slurm, 1)", "N", integer(1)),
        Option("--memory", "memory per machine, such as 32G", "SIZE", size),
        Option("--time", "time limit (default: that of the partition)", "[D-]HH:MM:SS", time),
        Option(
            "--elastic",
            "elastic job, which continues while MIN workers remain",
            "MIN:MAX",
            validators.range_option,
        ),
    )
    argument_parser.add(
        "location",
        Option("--name", "name of the job", "NAME", name, "train"),
        Option("--partition", "partition (default: that of the cluster)", "NAME", name),
        Option("--account", "account to charge (default: that of the user)", "NAME", name),
        Option("--constraint", "required feature of the machines", "FEATURE", name),
        Option("--module", "environment module to load", "NAME", module, []),
        Option("--venv", "virtual environment to activate", "DIR", path),
        Option("--image", "Apptainer image in which the program runs", "FILE", path),
        args.ENV,
    )
    argument_parser.add(
        "failures",
        Option(
            "--signal_secs", "time before the limit to save and requeue", "SECS", integer(10, 3600), 120
        ),
        Option("--max_restarts", "restarts after a lost worker, within the job", "N", integer(0, 100), 3),
    )
    return argument_parser


def _check_options(line: CommandLine) -> None:
    """Raises UsageError for incompatible options."""
    options = line.options
    if options.venv and options.image:
        raise UsageError(
            "--venv cannot be combined with --image; expected one of them: the image has its own packages"
        )
    if options.task_per == "gpu" and not options.gpus_per_node:
        raise UsageError("--task_per=gpu requires GPUs; add --gpus_per_node=N, or omit --task_per")
    if options.elastic:
        _check_elastic(options)
    match = _TIME.fullmatch(options.time or "")
    if match:
        hours = int(match["d"] or 0) * 24 + int(match["h"])
        limit_secs = hours * 3600 + int(match["m"]) * 60 + int(match["s"])
        least_secs = options.signal_secs + _SIGNAL_EARLY_SECS + _LEAST_TRAINING_SECS
        if limit_secs < least_secs:
            problem = f"--time={options.time} is too short for --signal_secs={options.signal_secs}"
            raise UsageError(
                f"{problem}; expected at least {_format_time(least_secs)}: Slurm may send the signal "
                f"{_SIGNAL_EARLY_SECS} s early. Increase --time, or decrease --signal_secs"
            )


def _check_elastic(options: argparse.Namespace) -> None:
    """Raises UsageError for options that an elastic job does not support."""
    parse_worker_range("--elastic", options.elastic)
    reasons = {
        "gpus_per_node": "elastic training uses CPUs",
        "image": "the launcher and the workers run outside of an image",
        "module": "the workers of other machines receive PATH, and no other variable of a module",
    }
    for name, reason in reasons.items():
        if getattr(options, name):
            raise UsageError(
                f"--{name} cannot be combined with --elastic={options.elastic}: {reason}. Omit one of them"
            )


def _format_time(secs: int) -> str:
    return f"{secs // 3600:02d}:{secs // 60 % 60:02d}:{secs % 60:02d}"


def _uses_array(program: Sequence[str]) -> bool:
    return any(_ARRAY_TASK.search(argument) for argument in program)


def _quote_argument(argument: str) -> str:
    """Returns an argument quoted so that the shell expands only `$SLURM_ARRAY_TASK_ID` in it."""
    parts = _ARRAY_TASK.split(argument)
    quoted = [f'"{part}"' if i % 2 else shlex.quote(part) for i, part in enumerate(parts) if part or i % 2]
    return "".join(quoted) or "''"


def _advice(line: CommandLine) -> Advice:
    options, warnings = line.options, []
    if line.flag("model_dir") is None:
        warnings.append(
            "the program has no --model_dir: a requeued job starts at step 0. "
            "Specify a directory on a shared file system"
        )
    if options.time is None:
        warnings.append("no --time: the limit of the partition applies, and most partitions require --time")
    if options.task_per == "node" and options.gpus_per_node == 0 and options.cpus_per_task is None:
        warnings.append("no --cpus_per_task: Slurm gives each task one CPU")
    shared_paths = [d for d in (line.flag("model_dir"), line.flag("data_dir"), options.venv) if d]
    fill_in = [f"{path}, on a shared file system" for path in shared_paths]
    fill_in += [
        f"{placeholder} in the command line" for placeholder in validators.find_placeholders(line.program)
    ]
    log = f"tail -f {options.name}-<job>.log"
    array = " --array=0-2" if _uses_array(line.program) else ""
    commands = [f"sbatch --test-only{array} {{file}}", f"sbatch{array} {{file}}", "squeue --me", log]
    return Advice(fill_in=fill_in, warnings=warnings, commands=commands)


def render_script(line: CommandLine, fill_in: Sequence[str]) -> str:
    """Returns the batch script."""
    options = line.options
    per_gpu = options.task_per == "gpu"
    program = list(line.program)
    if options.image:
        gpu = ["--nv"] if options.gpus_per_node else []
        program = ["apptainer", "exec", *gpu, options.image, *program]
    variables = validators.parse_variables(options.env)
    if options.elastic and variables:  # the workers of other machines do not receive exported ones
        program = ["env", *(f"{name}={value}" for name, value in variables.items()), *program]
    exports = [f"export {k}={shlex.quote(v)}" for k, v in variables.items()]
    model_dir = local_model_dir(program)
    values = {
        **vars(options),  # their converters reject characters that the shell interprets
        "header": manifest.file_header(line.as_text(), fill_in).rstrip("\n"),
        "tasks_per_node": options.gpus_per_node if per_gpu else 1,
        "gpus_per_task": 1 if per_gpu else None,
        "gpus_per_node": (options.gpus_per_node or None) if not per_gpu else None,
        "exports": "\n".join(exports) or None,
        "modules": "\n".join(f"module load {name}" for name in options.module) or None,
        "uses_array": _uses_array(program),
        "program": " ".join(map(_quote_argument, program)),
        "srun_cpus": f"--cpus-per-task={options.cpus_per_task} " if options.cpus_per_task else "",
        "model_dir": f"{_quote_argument(str(model_dir))} " if model_dir else "",
        "checkpoints": _quote_argument(f"{model_dir or '/nowhere'}/checkpoints"),
        "sees_checkpoints": model_dir is not None,
        "save_secs": options.signal_secs - min(_REQUEUE_SECS, options.signal_secs // 2),
        "machine_secs": _MACHINE_SECS,
        "retry_secs": _RETRY_SECS,
        "trained_secs": _TRAINED_SECS,
        "stuck_attempts": STUCK_ATTEMPTS,
        "exits_for_good": "|".join(map(str, (EXIT_FAILED, EXIT_USAGE, *_NOT_STARTED_CODES))),
        "exit_failed": EXIT_FAILED,
        "exit_preempted": EXIT_PREEMPTED,
        "exit_usage": EXIT_USAGE,
    }
    if not options.elastic:
        return manifest.fill_text("job.sbatch", values)
    maximum = parse_worker_range("--elastic", options.elastic).maximum
    values |= {
        "slots": -(-maximum // options.nodes),
        "exits_for_good": "|".join(
            map(str, (EXIT_FAILED, EXIT_USAGE, EXIT_PREEMPTED, *_NOT_STARTED_CODES))
        ),
    }
    return manifest.fill_text("job_elastic.sbatch", values)
