"""Options of a Vertex AI job that do not fit together; each mistake is one sentence."""

from collections.abc import Sequence

from ctl.deploy import checks
from ctl.deploy.args import CommandLine
from ctl.deploy.vertex import tuning
from ctl.errors import UsageError

_SHARED = ("/gcs/", "gs://", "/mnt/nfs/", "/mnt/lustre/")  # what all machines of a job see


def check(line: CommandLine, region: str, tuned: Sequence[str]) -> None:
    """Raises UsageError for what Vertex AI would refuse for its structure, or what cannot train.

    Args:
      line: the command line.
      region: of the job.
      tuned: the flags that are tuned.
    """
    checks.check_parameter_servers(line)
    _check_reduction_server(line)
    _check_tensorboard(line, region)
    _check_evaluator(line)
    if tuned:
        _check_tuning(line, tuned)
    for option in () if tuned else ("metric", "trials", "parallel_trials"):
        if getattr(line.options, option) is not None:
            raise UsageError(
                f"--{option} came without --tune; say what to vary, such as "
                "--tune=learning_rate:1e-4..1e-1:log"
            )


def _check_reduction_server(line: CommandLine) -> None:
    options = line.options
    if not options.reduction_server:
        return
    if options.ps:
        raise UsageError(
            "--reduction_server came with --ps; both take the third pool, so leave one of them out"
        )
    if not options.accelerator:
        raise UsageError(
            "--reduction_server came without GPUs; it adds up what NCCL sends. Give --accelerator, or "
            "leave it out"
        )
    if options.workers < 2:
        raise UsageError(
            "--reduction_server came with one worker, which has nobody to add up with; expected "
            "--workers=2 or more"
        )


def _check_tensorboard(line: CommandLine, region: str) -> None:
    options = line.options
    if not options.tensorboard:
        return
    if not options.service_account:
        raise UsageError("--tensorboard needs --service_account=EMAIL, who may write to it")
    if not options.base_output:
        raise UsageError("--tensorboard needs --base_output=gs://..., whose logs/ it shows")
    there = options.tensorboard.split("/")[3]
    if there != region and "REGION" not in (there, region):
        raise UsageError(f"--tensorboard is in {there} and the job in {region}; expected the same region")


def _check_evaluator(line: CommandLine) -> None:
    """UsageError when an evaluator could not see the checkpoints."""
    options, model_dir = line.options, line.flag("model_dir")
    if not options.evaluator:
        return
    if not options.base_output and model_dir is None and line.program:
        raise UsageError(
            "--evaluator needs the checkpoints; expected --base_output=gs://BUCKET/PATH, or "
            "--model_dir=/gcs/BUCKET/PATH among the flags of the program"
        )
    if model_dir and not model_dir.startswith(_SHARED):
        raise UsageError(
            f"--evaluator came with --model_dir={model_dir}, which is on the machine itself, and the "
            "evaluator's does not see it; expected /gcs/BUCKET/PATH, or a place in /mnt/nfs or /mnt/lustre"
        )


def _check_tuning(line: CommandLine, tuned: Sequence[str]) -> None:
    options = line.options
    if not line.program:
        raise UsageError(
            "--tune came without a program, and its flags would take the place of those that the image "
            "has; expected e.g. `-- python -m trainer.task`"
        )
    if options.metric is None:
        raise UsageError("--tune needs --metric=NAME, a number of the evaluation, such as accuracy")
    reported, metric = line.flag("report_hypertune"), tuning.metric(options.metric)["metric"]
    if reported not in (None, metric):
        raise UsageError(
            f"--metric={metric} came, but the program has --report_hypertune={reported}, so no trial would "
            f"report {metric}; leave --report_hypertune out, or write --metric={reported}"
        )
    for flag in tuned:
        if line.flag(flag) is not None:
            raise UsageError(
                f"--{flag} is tuned, and the program has a value for it; leave one of them out"
            )
    trials, parallel = tuning.trials(options)
    if parallel > trials:
        raise UsageError(
            f"--parallel_trials={parallel} is more than --trials={trials}; expected at most as many"
        )


def warnings(line: CommandLine) -> list[str]:
    """What looks wrong and may still be meant."""
    options, model_dir = line.options, line.flag("model_dir")
    found = checks.warnings(line, "--ps=N")
    if line.program and not options.base_output and model_dir is None:
        found.append("nothing says where the model goes: give --base_output, or --model_dir to the program")
    if model_dir and not model_dir.startswith(_SHARED):
        found.append(
            f"--model_dir={model_dir} is on the machine itself and is lost with it; a bucket is "
            "/gcs/BUCKET/PATH"
        )
    if model_dir and options.tune:
        found.append(
            "all trials would train in the same --model_dir, and ctl allows one at a time: give "
            "--base_output instead, which differs for each trial"
        )
    return found
