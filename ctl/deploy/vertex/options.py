"""Options of `ctl deploy vertex`.

The format of the values is checked. Vertex AI checks the existence of a machine type, a GPU or a region.
"""

import argparse

from ctl.deploy import args
from ctl.deploy.args import Option
from ctl.deploy.validators import BLANK, integer_option, pattern_option
from ctl.deploy.vertex import tuning

VERTEX_EXAMPLE = (
    "ctl deploy vertex --image=us-central1-docker.pkg.dev/PROJECT/flower-app/flowers:1 --workers=2 "
    "--base_output=gs://BUCKET/flowers -- python -m trainer.task --train_steps=1000"
)
REGION = rf"[a-z]+-[a-z]+[0-9]{{1,2}}|{BLANK}"
_MACHINE = "[a-z][a-z0-9]*-[a-z]+-?[a-z0-9-]*[a-z0-9]"
_MAX_NAME = 128
project = pattern_option(
    rf"[a-z]([a-z0-9.:-]{{0,61}}[a-z0-9])?|[0-9]{{1,20}}|{BLANK}",
    "not a project; expected its ID, such as --project=my-project",
)
_machine = pattern_option(_MACHINE, "not a machine type; expected e.g. n1-standard-8")
_gpus = pattern_option(
    "NVIDIA_[A-Z0-9_]+(:[1-9][0-9]?)?", "not a GPU of Vertex AI; expected e.g. NVIDIA_TESLA_V100:2"
)
_reduction_server = pattern_option(
    f"[1-9][0-9]{{0,2}}(:{_MACHINE})?", "not a count; expected COUNT or COUNT:TYPE, such as 4:n1-highcpu-16"
)
_bucket = pattern_option(
    rf"gs://(?:[a-z0-9][a-z0-9._-]{{1,61}}[a-z0-9]|{BLANK})(?:/[^\s?#]*)?",
    "not a Cloud Storage path; expected gs://BUCKET/PATH, such as gs://my-bucket/flowers",
)
_network = pattern_option(
    rf"projects/([0-9]+|{BLANK})/global/networks/[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?",
    "not a network; expected projects/NUMBER/global/networks/NAME, with the number of the project",
)
_account = pattern_option(
    r"[\w.-]+@[\w.-]+\.[a-z]{2,}", "not an e-mail address; expected NAME@PROJECT.iam.gserviceaccount.com"
)
_tensorboard = pattern_option(
    rf"projects/[\w:.-]+/locations/({REGION})/tensorboards/[\w-]+",
    "not a TensorBoard; expected projects/PROJECT/locations/REGION/tensorboards/ID",
)
_label = pattern_option(
    "[a-z][a-z0-9_-]{0,62}=[a-z0-9_-]{0,63}",
    "not a label; expected KEY=VALUE of lower-case letters, digits, - and _, at most 63 characters each, "
    "a letter first in KEY",
)
_region = pattern_option(REGION, "not a region; expected e.g. us-central1")


def _check_display_name(name: str) -> str:
    """Returns a display name."""
    if not 0 < len(name) <= _MAX_NAME:
        raise argparse.ArgumentTypeError(f"the name has {len(name)} characters; expected 1 to {_MAX_NAME}")
    return name


def parser() -> args.Parser:
    """Returns the parser of the options."""
    description = "Writes a CustomJob for Vertex AI, or a HyperparameterTuningJob."
    argument_parser = args.Parser("vertex", description, VERTEX_EXAMPLE, needs_program=False)
    argument_parser.add("the job", *args.job_options("machine", _check_display_name))
    argument_parser.add(
        "machines",
        Option("--machine_type", "type of the training machines", "TYPE", _machine, "n1-standard-4"),
        Option(
            "--accelerator",
            "GPUs of each training machine, such as NVIDIA_TESLA_V100:2",
            "GPU:COUNT",
            _gpus,
        ),
        Option("--reduction_server", "machines that reduce gradients", "COUNT[:TYPE]", _reduction_server),
        Option("--side_machine_type", "type of the other machines", "TYPE", _machine, "n1-standard-4"),
        Option(
            "--disk_gb", "boot disk of each machine (default: that of the service)", "GB", integer_option(1)
        ),
        Option("--spot", "use Spot machines, which are cheaper and can be preempted"),
    )
    argument_parser.add(
        "location",
        Option("--base_output", "parent of the AIP_... directories", "gs://...", _bucket),
        Option("--project", "project (default: that of the image)", "ID", project),
        Option("--region", "region (default: that of the image)", "REGION", _region),
        Option("--network", "projects/NUMBER/global/networks/NAME", "NAME", _network),
        Option(
            "--service_account",
            "service account of the program (default: that of the service)",
            "EMAIL",
            _account,
        ),
        Option("--tensorboard", "resource name of a TensorBoard instance", "NAME", _tensorboard),
        Option("--label", "label of the job", "KEY=VALUE", _label, []),
        Option("--submit", "submit the job to Vertex AI"),
    )
    argument_parser.add(
        "tuning",
        Option(
            "--tune", f"flag of the program to tune: {tuning.FORMS}", "RANGE", tuning.parse_parameter, []
        ),
        Option(
            "--metric",
            "metric to maximize, or to minimize with :minimize",
            "NAME[:GOAL]",
            tuning.parse_metric,
        ),
        Option("--trials", "total number of trials (default: 10)", "N", integer_option(1, 1000)),
        Option(
            "--parallel_trials", "number of concurrent trials (default: 2)", "N", integer_option(1, 1000)
        ),
    )
    return argument_parser
