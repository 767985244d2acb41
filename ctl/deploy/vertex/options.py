"""The options of `ctl deploy vertex`: what they are called, what they mean, which values they take."""

from ctl.deploy import args

EXAMPLE = (
    "ctl deploy vertex --image=us-central1-docker.pkg.dev/PROJECT/flower-app/flowers:1 --workers=2 "
    "--base_output=gs://BUCKET/flowers -- python -m trainer.task --train_steps=1000"
)
_MOST = 1000  # machines in one pool: a typing mistake rather than a wish


def parser() -> args.Parser:
    """The parser of the options."""
    made = args.parser(
        "vertex",
        "Writes a CustomJob for Vertex AI, or a HyperparameterTuningJob.",
        EXAMPLE,
        needs_program=False,
    )
    _add_machines(made)
    _add_place(made)
    _add_job(made)
    _add_tuning(made)
    return made


def _add_machines(parser: args.Parser) -> None:
    group = parser.add_argument_group("machines")
    add = group.add_argument
    add("--image", metavar="IMAGE:TAG", help="what runs on every machine that trains")
    add(
        "--workers",
        type=args.whole(1, _MOST),
        default=1,
        metavar="N",
        help="machines that train, the chief among them (default: 1)",
    )
    add("--machine_type", default="n1-standard-4", metavar="TYPE", help="(default: n1-standard-4)")
    add(
        "--accelerator",
        metavar="GPU:COUNT",
        help="GPUs of each, such as NVIDIA_TESLA_V100:2 (default: those of the machine type)",
    )
    add("--evaluator", action="store_true", help="one more machine evaluates the checkpoints")
    add("--ps", type=args.whole(0, _MOST), default=0, metavar="N", help="parameter servers (default: none)")
    add(
        "--reduction_server",
        metavar="COUNT[:TYPE]",
        help="machines that add up gradients of GPUs, of TYPE n1-highcpu-16 (default: none)",
    )
    add(
        "--side_machine_type",
        default="n1-standard-4",
        metavar="TYPE",
        help="of the evaluator and the parameter servers (default: n1-standard-4)",
    )
    add(
        "--disk_gb",
        type=args.whole(100, 64_000),
        metavar="GB",
        help="boot disk of each, 100 to 64000 (default: 100)",
    )
    add("--spot", action="store_true", help="on machines that may be taken away, for less money")


def _add_place(parser: args.Parser) -> None:
    add = parser.add_argument_group("place").add_argument
    add("--base_output", metavar="gs://...", help="where AIP_MODEL_DIR and AIP_TENSORBOARD_LOG_DIR are")
    add("--project", metavar="ID", help="(default: that of the image, or PROJECT to be filled in)")
    add("--region", metavar="REGION", help="(default: that of the image, or REGION to be filled in)")
    add("--network", metavar="NAME", help="projects/NUMBER/global/networks/NAME (default: none)")
    add("--service_account", metavar="EMAIL", help="whom the program is (default: the service's own)")
    add(
        "--tensorboard",
        metavar="NAME",
        help="projects/PROJECT/locations/REGION/tensorboards/ID, where the curves go (default: none)",
    )


def _add_job(parser: args.Parser) -> None:
    add = parser.add_argument_group("the job").add_argument
    add("--name", metavar="NAME", help="how it is shown (default: that of the image)")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable; repeatable")
    add("--label", action="append", default=[], metavar="KEY=VALUE", help="a label; repeatable")
    add("--timeout", metavar="TIME", help="such as 24h; the service ends it after 7 days (default: 7d)")
    add("--format", choices=("yaml", "json"), default="yaml", help="of the file (default: yaml)")
    add("--submit", action="store_true", help="send it to the service now")


def _add_tuning(parser: args.Parser) -> None:
    add = parser.add_argument_group("tuning").add_argument
    add(
        "--tune",
        action="append",
        default=[],
        metavar="RANGE",
        help="a flag of the program to vary: "
        "name:1e-4..1e-1:log, name:32..512 or name:adam|sgd; repeatable",
    )
    add("--metric", metavar="NAME[:GOAL]", help="a number of the evaluation to maximize, or :minimize")
    add("--trials", type=args.whole(1, 1000), metavar="N", help="trainings in all (default: 10)")
    add("--parallel_trials", type=args.whole(1, 100), metavar="N", help="at a time (default: 2)")
