"""The options of `ctl deploy vertex`: what they are called, what they mean, which values they take.

The values have the right form; whether a machine type, a GPU or a region exists is for Vertex AI to say.
"""

import argparse

from ctl.deploy import args
from ctl.deploy.validators import BLANK, form, whole
from ctl.deploy.vertex import tuning

EXAMPLE = (
    "ctl deploy vertex --image=us-central1-docker.pkg.dev/PROJECT/flower-app/flowers:1 --workers=2 "
    "--base_output=gs://BUCKET/flowers -- python -m trainer.task --train_steps=1000"
)
project = form(
    rf"[a-z]([a-z0-9.:-]{{0,61}}[a-z0-9])?|[0-9]{{1,20}}|{BLANK}",
    "no project; expected its ID, such as my-project",
)
REGION = rf"[a-z]+-[a-z]+[0-9]{{1,2}}|{BLANK}"
_MACHINE = "[a-z][a-z0-9]*-[a-z]+-?[a-z0-9-]*[a-z0-9]"
_MAX_NAME = 128


def parser() -> args.Parser:
    """The parser of the options."""
    description = "Writes a CustomJob for Vertex AI, or a HyperparameterTuningJob."
    made = args.Parser("vertex", description, EXAMPLE, needs_program=False)
    args.add_job_options(made, "machine", _name)
    _add_machines(made)
    _add_place(made)
    _add_tuning(made)
    return made


def _name(word: str) -> str:
    """A display name."""
    if not 0 < len(word) <= _MAX_NAME:
        raise argparse.ArgumentTypeError(f"it has {len(word)} characters; expected 1 to {_MAX_NAME}")
    return word


def _add_machines(parser: args.Parser) -> None:
    add = parser.add_argument_group("machines").add_argument
    machine = form(_MACHINE, "no machine type; expected one such as n1-standard-8")
    add(
        "--machine_type",
        type=machine,
        default="n1-standard-4",
        metavar="TYPE",
        help="(default: n1-standard-4)",
    )
    gpus = form(
        "NVIDIA_[A-Z0-9_]+(:[1-9][0-9]?)?", "no GPU of Vertex AI; expected e.g. NVIDIA_TESLA_V100:2"
    )
    help = "GPUs of each machine that trains, such as NVIDIA_TESLA_V100:2 (default: none)"
    add("--accelerator", type=gpus, metavar="GPU:COUNT", help=help)
    servers = form(
        f"[1-9][0-9]{{0,2}}(:{_MACHINE})?",
        "no count; expected COUNT or COUNT:TYPE, such as 4:n1-highcpu-16",
    )
    help = "machines that add up gradients of GPUs, of TYPE n1-highcpu-16 (default: none)"
    add("--reduction_server", type=servers, metavar="COUNT[:TYPE]", help=help)
    help = "of the evaluator and the parameter servers (default: n1-standard-4)"
    add("--side_machine_type", type=machine, default="n1-standard-4", metavar="TYPE", help=help)
    add("--disk_gb", type=whole(1), metavar="GB", help="boot disk of each machine (default: the service's)")
    add("--spot", action="store_true", help="on cheaper machines that Google may take away")


def _add_place(parser: args.Parser) -> None:
    add = parser.add_argument_group("place").add_argument
    bucket = form(
        rf"gs://(?:[a-z0-9][a-z0-9._-]{{1,61}}[a-z0-9]|{BLANK})(?:/[^\s?#]*)?",
        "no place in Cloud Storage; expected gs://BUCKET/PATH, such as gs://my-bucket/flowers",
    )
    add("--base_output", type=bucket, metavar="gs://...", help="where the AIP_... directories are")
    add("--project", type=project, metavar="ID", help="(default: that of the image, or PROJECT to fill in)")
    region = form(REGION, "no region; expected one such as us-central1")
    add(
        "--region", type=region, metavar="REGION", help="(default: that of the image, or REGION to fill in)"
    )
    network = form(
        rf"projects/([0-9]+|{BLANK})/global/networks/[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?",
        "no network; expected projects/NUMBER/global/networks/NAME, with the number of the project",
    )
    add(
        "--network",
        type=network,
        metavar="NAME",
        help="projects/NUMBER/global/networks/NAME (default: none)",
    )
    account = form(
        r"[\w.-]+@[\w.-]+\.[a-z]{2,}", "no e-mail address; expected NAME@PROJECT.iam.gserviceaccount.com"
    )
    help = "the account that the program runs as (default: the service's own)"
    add("--service_account", type=account, metavar="EMAIL", help=help)
    board = form(
        rf"projects/[\w:.-]+/locations/({REGION})/tensorboards/[\w-]+",
        "no TensorBoard; expected projects/PROJECT/locations/REGION/tensorboards/ID",
    )
    help = "projects/PROJECT/locations/REGION/tensorboards/ID, which shows the curves (default: none)"
    add("--tensorboard", type=board, metavar="NAME", help=help)
    label = form(
        "[a-z][a-z0-9_-]{0,62}=[a-z0-9_-]{0,63}",
        "no label; expected KEY=VALUE of lower-case letters, digits, - and _, at most 63 characters each, "
        "a letter first in KEY",
    )
    help = "a label; repeatable"
    add("--label", type=label, action="append", default=[], metavar="KEY=VALUE", help=help)
    add("--submit", action="store_true", help="send the job to Vertex AI now")


def _add_tuning(parser: args.Parser) -> None:
    add = parser.add_argument_group("tuning").add_argument
    help = "a flag of the program to vary: name:1e-4..1e-1:log, name:32..512 or name:adam|sgd; repeatable"
    add("--tune", type=tuning.parameter, action="append", default=[], metavar="RANGE", help=help)
    add(
        "--metric",
        type=tuning.metric,
        metavar="NAME[:GOAL]",
        help="a number of the evaluation to maximize, or :minimize",
    )
    add("--trials", type=whole(1, 1000), metavar="N", help="trainings in all (default: 10)")
    add("--parallel_trials", type=whole(1, 1000), metavar="N", help="at a time (default: 2)")
