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
    options, option = line.options, "--reduction_server"
    if not options.reduction_server:
        return
    if options.ps:
        raise UsageError(
            f"{option} cannot be combined with --ps: both use the third worker pool. Omit one of them"
        )
    if not options.accelerator:
        raise UsageError(
            f"{option} requires GPUs, whose gradients it reduces; expected --accelerator=GPU:COUNT"
        )
    if options.workers < 2:
        raise UsageError(f"{option} requires several workers; expected --workers=2 or more")


def _check_tensorboard(line: CommandLine, region: str) -> None:
    options = line.options
    if not options.tensorboard:
        return
    if not options.service_account:
        raise UsageError(
            "--tensorboard requires --service_account=EMAIL, an account with write access to it"
        )
    if not options.base_output:
        raise UsageError("--tensorboard requires --base_output=gs://..., whose logs/ it displays")
    tensorboard_region = options.tensorboard.split("/")[3]
    if tensorboard_region != region and "REGION" not in (tensorboard_region, region):
        raise UsageError(
            f"--tensorboard is in {tensorboard_region} and the job in {region}; expected the same region"
        )


def _check_evaluator(line: CommandLine) -> None:
    """Raises UsageError if the evaluator could not read the checkpoints."""
    model_dir = line.flag("model_dir")
    expected = "expected --model_dir=/gcs/BUCKET/PATH among the flags of the program"
    if not line.options.evaluator:
        return
    if not line.options.base_output and model_dir is None and line.program:
        raise UsageError(f"--evaluator requires the checkpoints; {expected}, or --base_output=gs://...")
    if model_dir and not model_dir.startswith(_SHARED):
        problem = f"--evaluator requires a shared --model_dir, but {model_dir} is local to the machine"
        raise UsageError(f"{problem}; {expected}, or a path in /mnt/nfs or /mnt/lustre")


def _check_tuning(line: CommandLine) -> None:
    options = line.options
    if not options.tune:
        for option in ("metric", "trials", "parallel_trials"):
            if getattr(options, option) is not None:
                raise UsageError(f"--{option} requires --tune; expected e.g. --tune=units:32..512")
        return
    if not line.program:
        problem = "--tune requires a program, because its flags replace those of the image"
        raise UsageError(f"{problem}; expected e.g. `-- python -m trainer.task`")
    if options.metric is None:
        raise UsageError("--tune requires --metric=NAME, a metric of the evaluation, such as accuracy")
    reported_metric, metric = line.flag("report_hypertune"), options.metric["metric"]
    if reported_metric not in (None, metric):
        problem = f"--metric={metric} differs from --report_hypertune={reported_metric} of the program"
        raise UsageError(f"{problem}, so no trial would report {metric}; omit --report_hypertune")
    names = [parameter["parameterId"] for parameter in options.tune]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--tune={name} was given twice; expected one range per flag")
        if line.flag(name) is not None:
            raise UsageError(f"--{name} is tuned, and the program has a value for it; omit one of them")
    trials, parallel_trials = tuning.trial_counts(options)
    if parallel_trials > trials:
        raise UsageError(
            f"--parallel_trials={parallel_trials} is greater than --trials={trials}; expected "
            f"at most {trials}"
        )


def vertex_warnings(line: CommandLine) -> list[str]:
    """Returns warnings for probable mistakes."""
    options, model_dir = line.options, line.flag("model_dir")
    warnings = checks.program_warnings(line, "--ps=N")
    if line.program and not options.base_output and model_dir is None:
        warnings.append(
            "the model has no output directory: add --base_output, or --model_dir to the program"
        )
    if model_dir and not model_dir.startswith(_SHARED):
        explanation = "is local to the machine and is lost with it; use /gcs/BUCKET/PATH for a bucket"
        warnings.append(f"--model_dir={model_dir} {explanation}")
    if model_dir and options.tune:
        fix = "use --base_output instead, which differs for each trial"
        warnings.append(
            f"all trials would train in the same --model_dir, and ctl allows one at a time: {fix}"
        )
    return warnings
