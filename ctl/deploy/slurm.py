"""`ctl deploy slurm`: a batch script that starts one task per machine or per GPU with srun.

The time limit is near: Slurm signals the script, every task saves, and the job goes back into the queue
and on from there. A lost machine does the same; an error that another try would not mend ends the job.
"""

import argparse
import re
import shlex
from collections.abc import Sequence

from ctl.deploy import args, output, texts, validators
from ctl.deploy.args import Asked
from ctl.deploy.output import Advice
from ctl.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE, UsageError
from ctl.io.console import quoted
from ctl.launch.progress import local_model_dir
from ctl.launch.restart_policy import STUCK_ATTEMPTS

PLATFORM = "slurm"
_EXAMPLE = (
    "ctl deploy slurm --nodes=2 --time=04:00:00 --output=flowers.sbatch -- "
    "python -m models.flowers --data_dir=/shared/flower_photos --model_dir=/shared/runs/flowers"
)
_TIME = re.compile(r"(?:(?P<d>[0-9]{1,3})-)?(?P<h>[0-9]{1,3}):(?P<m>[0-9]{2}):(?P<s>[0-9]{2})")
_MEMORY = re.compile(r"[1-9][0-9]{0,6}[KMGT]?")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:+-]{0,99}")
_NOT_STARTED = (126, 127)  # of a shell: the program cannot be run, or is not there
_TRAINED_SECS = 600  # an attempt this long has got on, where its checkpoints cannot be seen
_PATH = re.compile(r"[^\s'\"\\$`;&|<>*?]+")


def main(argv: Sequence[str]) -> int:
    """Writes the script; returns 0, or 2 for what cannot be."""
    return args.guarded(PLATFORM, lambda: _work(argv))


def _work(argv: Sequence[str]) -> None:
    asked = args.read(parser(), argv)
    if asked is None:
        return
    options = asked.options
    _check(options)
    advice = _advice(asked)
    text = script(asked, advice.fill_in)
    output.deliver(text, options.output, advice, force=options.force, default=f"{options.name}.sbatch")


def parser() -> args.Parser:
    """The options of `ctl deploy slurm`."""
    made = args.parser(PLATFORM, "Writes a batch script for Slurm.", _EXAMPLE)
    size = made.add_argument_group("size")
    size.add_argument("--nodes", type=args.whole(1, 10_000), default=1, help="machines (default: 1)")
    size.add_argument(
        "--task_per",
        choices=("node", "gpu"),
        default="node",
        help="one process for each machine, with all its GPUs, or for each GPU",
    )
    size.add_argument(
        "--gpus_per_node",
        type=args.whole(0, 64),
        default=0,
        metavar="N",
        help="GPUs of each machine (default: 0)",
    )
    size.add_argument(
        "--cpus_per_task",
        type=args.whole(1, 1024),
        metavar="N",
        help="CPUs of each task (default: Slurm's, one)",
    )
    size.add_argument("--memory", metavar="SIZE", help="of each machine, such as 32G")
    size.add_argument("--time", metavar="[D-]HH:MM:SS", help="the time limit (default: the partition's)")
    _add_where(made.add_argument_group("where"))
    failing = made.add_argument_group("when things go wrong")
    failing.add_argument(
        "--signal_secs",
        type=args.whole(10, 3600),
        default=120,
        metavar="SECS",
        help="before the time limit, to save and go back into the queue (default: 120)",
    )
    failing.add_argument(
        "--max_restarts",
        type=args.whole(0, 100),
        default=3,
        metavar="N",
        help="after a lost worker, within the job (default: 3)",
    )
    return made


def _add_where(where: argparse._ArgumentGroup) -> None:
    """The options that say in which queue and environment the job runs."""
    where.add_argument("--name", default="train", help="of the job (default: train)")
    where.add_argument("--partition", metavar="NAME", help="the queue (default: the cluster's)")
    where.add_argument("--account", metavar="NAME", help="who pays (default: yours)")
    where.add_argument("--constraint", metavar="FEATURE", help="a feature that machines must have")
    where.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="NAME",
        help="`module load` it first; may come several times",
    )
    where.add_argument("--venv", metavar="DIR", help="a virtual environment to activate")
    where.add_argument("--image", metavar="FILE", help="an Apptainer image to run the program in")
    where.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable, no secrets; may come several times",
    )


def _check(options: argparse.Namespace) -> None:
    """Raises UsageError for what Slurm would refuse, or what would not do what it says."""
    for name in ("name", "partition", "account", "constraint"):
        given = getattr(options, name)
        if given is not None and not _WORD.fullmatch(given):
            raise UsageError(f"--{name}={quoted(given)} is no name; expected letters, digits, - and _")
    for given in options.module:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_./+-]{0,99}", given):
            raise UsageError(f"--module={quoted(given)} is no module; expected a name such as cuda/12.4")
    for name in ("venv", "image"):
        given = getattr(options, name)
        if given is not None and not _PATH.fullmatch(given):
            raise UsageError(f"--{name}={quoted(given)} is no path; expected one without spaces or quotes")
    if options.venv and options.image:
        raise UsageError("--venv and --image came; expected one of them: the image has its own packages")
    if options.memory is not None and not _MEMORY.fullmatch(options.memory):
        raise UsageError(f"--memory={quoted(options.memory)} is no size; expected e.g. 32G")
    if options.task_per == "gpu" and not options.gpus_per_node:
        raise UsageError("--task_per=gpu came without GPUs; add --gpus_per_node=N, or leave it out")
    limit = _secs(options.time)
    if limit is not None and limit <= options.signal_secs:
        raise UsageError(
            f"--time={options.time} is not longer than --signal_secs={options.signal_secs}; expected time "
            "to train before it is time to save"
        )


def _secs(text: str | None) -> int | None:
    """Seconds of a time limit, from [D-]HH:MM:SS."""
    if text is None:
        return None
    found = _TIME.fullmatch(text)
    if not found or int(found["m"]) > 59 or int(found["s"]) > 59:
        raise UsageError(f"--time={quoted(text)} is no time limit; expected e.g. 04:00:00 or 2-12:00:00")
    days, hours = int(found["d"] or 0), int(found["h"])
    return ((days * 24 + hours) * 60 + int(found["m"])) * 60 + int(found["s"])


def _advice(asked: Asked) -> Advice:
    options, warnings, fill_in = asked.options, [], []
    if asked.flag("model_dir") is None:
        warnings.append(
            "the program has no --model_dir: a job that goes back into the queue begins again at step 0. "
            "Give it a directory that all machines see"
        )
    if options.time is None:
        warnings.append("no --time: the partition's limit holds, and most queues want one")
    if options.task_per == "node" and options.gpus_per_node == 0 and options.cpus_per_task is None:
        warnings.append("no --cpus_per_task: Slurm gives each task one CPU")
    seen = [d for d in (asked.flag("model_dir"), asked.flag("data_dir"), options.venv) if d]
    fill_in += [f"{path}, on a file system that every machine sees" for path in seen]
    fill_in += [f"{word} in the command line" for word in validators.blanks(asked.program)]
    return Advice(
        fill_in=fill_in,
        warnings=warnings,
        commands=["sbatch {file}", "squeue --me", f"tail -f {options.name}-<job>.log"],
    )


def script(asked: Asked, fill_in: Sequence[str]) -> str:
    """The batch script."""
    options = asked.options
    tasks = options.gpus_per_node if options.task_per == "gpu" else 1
    directives = {
        "job-name": options.name,
        "partition": options.partition,
        "account": options.account,
        "constraint": options.constraint,
        "nodes": options.nodes,
        "ntasks-per-node": tasks,
        "gpus-per-task": 1 if options.task_per == "gpu" else None,
        "gpus-per-node": (options.gpus_per_node or None) if options.task_per == "node" else None,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.memory,
        "time": options.time,
        "signal": f"B:USR1@{options.signal_secs}",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    lines = [f"#SBATCH --{k}{f'={v}' if v != '' else ''}" for k, v in directives.items() if v is not None]
    program = list(asked.program)
    if options.image:
        gpu = ["--nv"] if options.gpus_per_node else []
        program = ["apptainer", "exec", *gpu, options.image, *program]
    setup = [f"export {k}={shlex.quote(v)}" for k, v in validators.variables(options.env, PLATFORM).items()]
    setup += [f"module load {name}" for name in options.module]
    setup += [f"source {options.venv}/bin/activate || exit {EXIT_USAGE}"] if options.venv else []
    model_dir = local_model_dir(program)
    return _BODY.format(
        header=texts.header(asked.line(), fill_in).rstrip("\n"),
        directives="\n".join(lines),
        setup="".join(f"{line}\n" for line in setup),
        program=shlex.join(program),
        restarts=options.max_restarts,
        preempted=EXIT_PREEMPTED,
        stuck=STUCK_ATTEMPTS,
        checkpoints=shlex.quote(f"{model_dir or '/nowhere'}/checkpoints"),
        got_on="" if model_dir else f' || [ "$((SECONDS - began))" -ge {_TRAINED_SECS} ]',
        for_good="|".join(map(str, (EXIT_FAILED, EXIT_USAGE, *_NOT_STARTED))),
        cpus=f"--cpus-per-task={options.cpus_per_task} " if options.cpus_per_task else "",
    )


_BODY = """\
#!/bin/bash
{header}
{directives}

{setup}set -u
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}}}
job=${{job:-$SLURM_JOB_ID}}
export CTL_FOR_GOOD="${{SLURM_SUBMIT_DIR:-$PWD}}/.ctl-for-good-$SLURM_JOB_ID"  # made by a task
rm -f "$CTL_FOR_GOOD"
time_is_up=

# the time limit is near: every task saves and leaves
trap 'time_is_up=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

# a task waits for its program on SIGTERM, and leaves word of an error that comes again
task='trap : TERM
"$@"
code=$?
case "$code" in {for_good}) echo "$code" > "$CTL_FOR_GOOD";; esac
exit "$code"'

go_back() {{
  echo "The time limit is near: job $job goes back into the queue."
  scontrol requeue "$job" && exit 0
  echo "Slurm refused to put job $job back; submit the same script again to go on." >&2
  exit {preempted}
}}

# the step of the newest checkpoint: progress gives all restarts back
newest() {{ ls {checkpoints} 2> /dev/null | sed -n 's/^ckpt-\\([0-9]*\\)$/\\1/p' | sort -n | tail -n 1; }}

restart=0 best=$(newest) before= alike=0
while [ "$restart" -le {restarts} ]; do
  if [ -n "$time_is_up" ]; then go_back; fi
  began=$SECONDS
  srun --kill-on-bad-exit=1 --distribution=block {cpus}bash -c "$task" task \\
    {program} &
  step=$!
  while :; do wait "$step"; code=$?; kill -0 "$step" 2> /dev/null || break; done
  if [ "$code" = 0 ]; then exit 0; fi
  if [ -n "$time_is_up" ]; then go_back; fi
  if [ -e "$CTL_FOR_GOOD" ]; then
    code=$(cat "$CTL_FOR_GOOD"); rm -f "$CTL_FOR_GOOD"
    echo "A task ended with $code, which another try would not mend." >&2
    exit "$code"
  fi
  echo "A task was lost (srun: $code), after $restart restarts of {restarts}." >&2
  now=$(newest)
  if [ "${{now:-0}}" -gt "${{best:-0}}" ]; then restart=0 best=$now alike=0; fi
  if [ "$code" != "$before" ]{got_on}; then alike=0; fi
  alike=$((alike + 1))
  before=$code
  if [ "$alike" -ge {stuck} ]; then
    echo "No progress: {stuck} attempts in a row ended with $code." >&2
    break
  fi
  sleep $((restart < 5 ? 2 ** restart : 60)) & wait $!
  restart=$((restart + 1))
done
if [ -n "$time_is_up" ]; then go_back; fi
exit "$code"
"""
