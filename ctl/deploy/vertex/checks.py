"""Checks for incompatible options of a Vertex AI job. Each error message is one sentence."""

from ctl.deploy import checks
from ctl.deploy.args import CommandLine
from ctl.deploy.vertex import tuning
from ctl.errors import UsageError

_SHARED = ("/gcs/", "gs://", "/mnt/nfs/", "/mnt/lustre/")  # paths that all machines share


def check_job(line: CommandLine, region: str) -> None:
    """Raises UsageError for a job that Vertex AI would reject or that cannot train."""
    checks.check_parameter_servers(line)
    _check_reduction_server(line)
    _check_tensorboard(line, region)
    _check_evaluator(line)
    _check_tuning(line)


def _check_reduction_server(line: CommandLine) -> None:
    options, came = line.options, "--reduction_server came"
    if not options.reduction_server:
        return
    if options.ps:
        raise UsageError(f"{came} with --ps; both take the third pool, so leave one of them out")
    if not options.accelerator:
        raise UsageError(
            f"{came} without GPUs, whose gradients it adds up; expected --accelerator=GPU:COUNT"
        )
    if options.workers < 2:
        raise UsageError(f"{came} with one worker, which has no gradients to add; expected --workers=2")


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
    """Raises UsageError if the evaluator could not read the checkpoints."""
    model_dir = line.flag("model_dir")
    expected = "expected --model_dir=/gcs/BUCKET/PATH among the flags of the program"
    if not line.options.evaluator:
        return
    if not line.options.base_output and model_dir is None and line.program:
        raise UsageError(f"--evaluator needs the checkpoints; {expected}, or --base_output=gs://...")
    if model_dir and not model_dir.startswith(_SHARED):
        came = f"--evaluator came, but --model_dir={model_dir} is on the machine itself"
        raise UsageError(f"{came}; {expected}, or a place in /mnt/nfs or /mnt/lustre")


def _check_tuning(line: CommandLine) -> None:
    options = line.options
    if not options.tune:
        for option in ("metric", "trials", "parallel_trials"):
            if getattr(options, option) is not None:
                raise UsageError(f"--{option} came without --tune; expected e.g. --tune=units:32..512")
        return
    if not line.program:
        came = "--tune came without a program, and its flags would take the place of the image's"
        raise UsageError(f"{came}; expected e.g. `-- python -m trainer.task`")
    if options.metric is None:
        raise UsageError("--tune needs --metric=NAME, a number of the evaluation, such as accuracy")
    reported, metric = line.flag("report_hypertune"), options.metric["metric"]
    if reported not in (None, metric):
        came = f"--metric={metric} came, but the program has --report_hypertune={reported}"
        raise UsageError(f"{came}, so no trial would report {metric}; leave --report_hypertune out")
    names = [parameter["parameterId"] for parameter in options.tune]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--tune={name} came twice; expected one range for each flag")
        if line.flag(name) is not None:
            raise UsageError(f"--{name} is tuned, and the program has a value for it; leave one out")
    trials, parallel = tuning.trials(options)
    if parallel > trials:
        raise UsageError(f"--parallel_trials={parallel} is more than --trials={trials}; expected fewer")


def vertex_warnings(line: CommandLine) -> list[str]:
    """Returns warnings for probable mistakes."""
    options, model_dir = line.options, line.flag("model_dir")
    found = checks.program_warnings(line, "--ps=N")
    if line.program and not options.base_output and model_dir is None:
        found.append("nothing says where the model goes: give --base_output, or --model_dir to the program")
    if model_dir and not model_dir.startswith(_SHARED):
        lost = "is on the machine itself and is lost with it; a bucket is /gcs/BUCKET/PATH"
        found.append(f"--model_dir={model_dir} {lost}")
    if model_dir and options.tune:
        cure = "give --base_output instead, which differs for each trial"
        found.append(
            f"all trials would train in the same --model_dir, and ctl allows one at a time: {cure}"
        )
    return found
