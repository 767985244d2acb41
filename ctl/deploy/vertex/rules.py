"""What Vertex AI asks for and its messages' types do not say; each mistake is one sentence."""

import argparse
import re
from collections.abc import Sequence

from ctl.deploy import lint, validators
from ctl.deploy.args import Asked
from ctl.deploy.vertex import machines, tuning
from ctl.deploy.vertex.job import Pools, Surroundings
from ctl.deploy.vertex.machines import Machine
from ctl.errors import UsageError
from ctl.io.console import quoted

_TENSORBOARD = re.compile(r"projects/([\w:.-]+)/locations/([a-z0-9-]+|[A-Z_]+)/tensorboards/[\w-]+")
_NETWORK = re.compile(r"projects/([0-9]+|[A-Z_]+)/global/networks/[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_EMAIL = re.compile(r"[\w.-]+@[\w.-]+\.[a-z]{2,}")
_LABEL_KEY, _LABEL_VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")
_MOST_NAME, _MOST_LABELS = 128, 64
_SHARED = ("/gcs/", "gs://", "/mnt/nfs/", "/mnt/lustre/")  # what all machines of a job see


def pools(options: argparse.Namespace) -> Pools:
    """The machines asked for; UsageError for combinations that cannot be."""
    machine = machines.read("--machine_type", options.machine_type, options.accelerator)
    side = machines.read("--side_machine_type", options.side_machine_type, None)
    reduction = _reduction(options, machine)
    if options.ps and options.workers < 2:
        raise UsageError(
            f"--ps={options.ps} came with --workers=1, the chief, which does not train then; expected "
            "--workers=2 or more"
        )
    return Pools(
        machine=machine,
        workers=options.workers,
        side=side,
        ps=options.ps,
        reduction=reduction,
        evaluator=options.evaluator,
        disk_gb=options.disk_gb,
    )


def _reduction(options: argparse.Namespace, machine: Machine) -> tuple[Machine, int]:
    if options.reduction_server is None:
        return Machine("n1-highcpu-16"), 0
    text = options.reduction_server
    count, _, kind = text.partition(":")
    if not re.fullmatch("[1-9][0-9]{0,2}", count):
        raise UsageError(
            f"--reduction_server={quoted(text)} has no count; expected COUNT or COUNT:TYPE, such as "
            "4:n1-highcpu-16"
        )
    if options.ps:
        raise UsageError(
            "--reduction_server came with --ps; both take the third pool, so leave one of them out"
        )
    if not machine.count:
        raise UsageError(
            "--reduction_server came without GPUs; it adds up what NCCL sends. Give --accelerator, or "
            "leave it out"
        )
    if options.workers < 2:
        raise UsageError(
            "--reduction_server came with one worker, which has nobody to add up with; expected "
            "--workers=2 or more"
        )
    own = machines.read("--reduction_server", kind or "n1-highcpu-16", None)
    if own.count:
        raise UsageError(
            f"--reduction_server={quoted(text)} names a machine with GPUs; expected one "
            "without, such as n1-highcpu-16"
        )
    return own, int(count)


def surroundings(options: argparse.Namespace, region: str) -> Surroundings:
    """Outputs, identity, network, time; UsageError for forms that the service refuses."""
    if options.base_output:
        validators.bucket("--base_output", options.base_output)
    if options.service_account and not _EMAIL.fullmatch(options.service_account):
        raise UsageError(
            f"--service_account={quoted(options.service_account)} is no e-mail address; expected "
            "NAME@PROJECT.iam.gserviceaccount.com"
        )
    if options.network and not _NETWORK.fullmatch(options.network):
        raise UsageError(
            f"--network={quoted(options.network)} cannot be read; expected "
            "projects/NUMBER/global/networks/NAME, with the number of the project"
        )
    if options.tensorboard:
        _check_tensorboard(options, region)
    secs = validators.seconds("--timeout", options.timeout) if options.timeout else None
    return Surroundings(
        base_output=options.base_output,
        service_account=options.service_account,
        network=options.network,
        tensorboard=options.tensorboard,
        timeout_secs=secs,
        spot=options.spot,
    )


def _check_tensorboard(options: argparse.Namespace, region: str) -> None:
    found = _TENSORBOARD.fullmatch(options.tensorboard)
    if not found:
        raise UsageError(
            f"--tensorboard={quoted(options.tensorboard)} cannot be read; expected "
            "projects/PROJECT/locations/REGION/tensorboards/ID"
        )
    if not options.service_account:
        raise UsageError("--tensorboard needs --service_account=EMAIL, who may write to it")
    if not options.base_output:
        raise UsageError("--tensorboard needs --base_output=gs://…, whose logs/ it shows")
    if not {found[2], region} & {"REGION", ""} and found[2] != region:
        raise UsageError(
            f"--tensorboard is in {found[2]} and the job in {region}; expected the same region"
        )


def name(text: str) -> str:
    """A display name; UsageError for an empty or a long one."""
    if not 0 < len(text) <= _MOST_NAME:
        raise UsageError(f"--name has {len(text)} characters; expected 1 to {_MOST_NAME}")
    return text


def labels(given: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE words as labels; UsageError for forms that Google Cloud refuses."""
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (equals and _LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value)) or key in found:
            raise UsageError(
                f"--label={quoted(text)} is no label, or came twice; expected KEY=VALUE of lower-case "
                "letters, digits, - and _, at most 63 characters each, a letter first in KEY"
            )
        found[key] = value
    if len(found) > _MOST_LABELS:
        raise UsageError(f"{len(found)} labels came; expected at most {_MOST_LABELS}")
    return found


def check_tuning(asked: Asked, tuned: Sequence[str]) -> None:
    """UsageError when options of tuning come alone, or the program sets what is tuned."""
    options = asked.options
    if not tuned:
        for option in ("metric", "trials", "parallel_trials"):
            if getattr(options, option) is not None:
                raise UsageError(
                    f"--{option} came without --tune; say what to vary, such as "
                    "--tune=learning_rate:1e-4..1e-1:log"
                )
        return
    if not asked.program:
        raise UsageError(
            "--tune came without a program, and its flags would take the place of those that the image "
            "has; expected e.g. `-- python -m trainer.task`"
        )
    if options.metric is None:
        raise UsageError("--tune needs --metric=NAME, a number of the evaluation, such as accuracy")
    reported, metric = asked.flag("report_hypertune"), tuning.metric(options.metric)["metricId"]
    if reported not in (None, metric):
        raise UsageError(
            f"--metric={metric} came, but the program has --report_hypertune={reported}, so no trial would "
            f"report {metric}; leave --report_hypertune out, or write --metric={reported}"
        )
    for flag in tuned:
        if asked.flag(flag) is not None:
            raise UsageError(
                f"--{flag} is tuned, and the program has a value for it; leave one of them out"
            )
    trials, parallel = options.trials or 10, options.parallel_trials or 2
    if parallel > trials:
        raise UsageError(
            f"--parallel_trials={parallel} is more than --trials={trials}; expected at most as many"
        )


def check_evaluator(asked: Asked) -> None:
    """UsageError when an evaluator could not see the checkpoints."""
    options, model_dir = asked.options, asked.flag("model_dir")
    if options.evaluator and not options.base_output and model_dir is None and asked.program:
        raise UsageError(
            "--evaluator needs the checkpoints; expected --base_output=gs://BUCKET/PATH, or "
            "--model_dir=/gcs/BUCKET/PATH among the flags of the program"
        )
    if options.evaluator and model_dir and _is_lost(model_dir):
        raise UsageError(
            f"--evaluator came with --model_dir={model_dir}, which is on the machine itself, and the "
            "evaluator's does not see it; expected /gcs/BUCKET/PATH, or a place in /mnt/nfs or /mnt/lustre"
        )


def _is_lost(model_dir: str) -> bool:
    """Whether a directory is on one machine alone."""
    return not model_dir.startswith(_SHARED)


def warnings(asked: Asked, machine: Machine) -> list[str]:
    """What looks wrong and may still be meant."""
    options, model_dir = asked.options, asked.flag("model_dir")
    found = lint.strategy(
        asked, ps=options.ps, workers=options.workers, each="machines", cure="give --ps=N"
    )
    if not asked.program:
        found.append(lint.NO_PROGRAM)
    elif not options.base_output and model_dir is None:
        found.append("nothing says where the model goes: give --base_output, or --model_dir to the program")
    if model_dir and _is_lost(model_dir):
        found.append(
            f"--model_dir={model_dir} is on the machine itself and is lost with it; a bucket is "
            "/gcs/BUCKET/PATH"
        )
    if model_dir and options.tune:
        found.append(
            "all trials would train in the same --model_dir, and ctl allows one at a time: give "
            "--base_output instead, which differs for each trial"
        )
    if machine.gpu == "NVIDIA_TESLA_P100":
        found.append("P100 GPUs are not supported after 2026-09-15")
    return found
