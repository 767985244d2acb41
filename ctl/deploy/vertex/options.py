"""Options of `ctl deploy vertex`.

The format of the values is checked. Vertex AI checks the existence of a machine type, a GPU or a region.
"""

import argparse

from ctl.deploy import args
from ctl.deploy.args import Option
from ctl.deploy.validators import BLANK, form, whole_option
from ctl.deploy.vertex import tuning

VERTEX_EXAMPLE = (
    "ctl deploy vertex --image=us-central1-docker.pkg.dev/PROJECT/flower-app/flowers:1 --workers=2 "
    "--base_output=gs://BUCKET/flowers -- python -m trainer.task --train_steps=1000"
)
REGION = rf"[a-z]+-[a-z]+[0-9]{{1,2}}|{BLANK}"
_MACHINE = "[a-z][a-z0-9]*-[a-z]+-?[a-z0-9-]*[a-z0-9]"
_MAX_NAME = 128
project = form(
    rf"[a-z]([a-z0-9.:-]{{0,61}}[a-z0-9])?|[0-9]{{1,20}}|{BLANK}",
    "no project; expected its ID, such as --project=my-project",
)
_machine = form(_MACHINE, "no machine type; expected one such as n1-standard-8")
_gpus = form("NVIDIA_[A-Z0-9_]+(:[1-9][0-9]?)?", "no GPU of Vertex AI; expected e.g. NVIDIA_TESLA_V100:2")
_reduction_server = form(
    f"[1-9][0-9]{{0,2}}(:{_MACHINE})?", "no count; expected COUNT or COUNT:TYPE, such as 4:n1-highcpu-16"
)
_bucket = form(
    rf"gs://(?:[a-z0-9][a-z0-9._-]{{1,61}}[a-z0-9]|{BLANK})(?:/[^\s?#]*)?",
    "no place in Cloud Storage; expected gs://BUCKET/PATH, such as gs://my-bucket/flowers",
)
_network = form(
    rf"projects/([0-9]+|{BLANK})/global/networks/[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?",
    "no network; expected projects/NUMBER/global/networks/NAME, with the number of the project",
)
_account = form(
    r"[\w.-]+@[\w.-]+\.[a-z]{2,}", "no e-mail address; expected NAME@PROJECT.iam.gserviceaccount.com"
)
_tensorboard = form(
    rf"projects/[\w:.-]+/locations/({REGION})/tensorboards/[\w-]+",
    "no TensorBoard; expected projects/PROJECT/locations/REGION/tensorboards/ID",
)
_label = form(
    "[a-z][a-z0-9_-]{0,62}=[a-z0-9_-]{0,63}",
    "no label; expected KEY=VALUE of lower-case letters, digits, - and _, at most 63 characters each, "
    "a letter first in KEY",
)
_region = form(REGION, "no region; expected one such as us-central1")


def _name(word: str) -> str:
    """Returns a display name."""
    if not 0 < len(word) <= _MAX_NAME:
        raise argparse.ArgumentTypeError(f"it has {len(word)} characters; expected 1 to {_MAX_NAME}")
    return word


def parser() -> args.Parser:
    """Returns the parser of the options."""
    description = "Writes a CustomJob for Vertex AI, or a HyperparameterTuningJob."
    made = args.Parser("vertex", description, VERTEX_EXAMPLE, needs_program=False)
    made.add("the job", *args.job_options("machine", _name))
    made.add(
        "machines",
        Option("--machine_type", "of each that trains", "TYPE", _machine, "n1-standard-4"),
        Option(
            "--accelerator", "GPUs of each that trains, such as NVIDIA_TESLA_V100:2", "GPU:COUNT", _gpus
        ),
        Option("--reduction_server", "machines that add gradients up", "COUNT[:TYPE]", _reduction_server),
        Option("--side_machine_type", "of evaluator, parameter servers", "TYPE", _machine, "n1-standard-4"),
        Option("--disk_gb", "boot disk of each machine (default: the service's)", "GB", whole_option(1)),
        Option("--spot", "on cheaper machines that Google may take away"),
    )
    made.add(
        "place",
        Option("--base_output", "where the AIP_... directories are", "gs://...", _bucket),
        Option("--project", "the project (default: that of the image)", "ID", project),
        Option("--region", "the region (default: that of the image)", "REGION", _region),
        Option("--network", "projects/NUMBER/global/networks/NAME", "NAME", _network),
        Option(
            "--service_account", "which the program runs as (default: the service's)", "EMAIL", _account
        ),
        Option("--tensorboard", "shows the curves: its resource name", "NAME", _tensorboard),
        Option("--label", "a label", "KEY=VALUE", _label, []),
        Option("--submit", "send the job to Vertex AI now"),
    )
    made.add(
        "tuning",
        Option("--tune", f"a flag of the program to vary: {tuning.FORMS}", "RANGE", tuning.parameter, []),
        Option("--metric", "what to maximize, or :minimize", "NAME[:GOAL]", tuning.metric),
        Option("--trials", "trainings in all (default: 10)", "N", whole_option(1, 1000)),
        Option("--parallel_trials", "trainings at a time (default: 2)", "N", whole_option(1, 1000)),
    )
    return made
