"""The options of `ctl deploy kubernetes`: what they are called, what they mean, which values they take."""

from ctl.deploy import args

EXAMPLE = (
    "ctl deploy kubernetes --image=ghcr.io/me/flowers:1 --workers=2 --storage=10Gi "
    "-- python -m trainer.task --model_dir=/shared/flowers"
)
FLAVORS = ("job", "tfjob", "trainjob")


def parser() -> args.Parser:
    """The parser of the options."""
    made = args.parser(
        "kubernetes",
        "Writes a Job, a TFJob or a TrainJob, and what stands around it.",
        EXAMPLE,
        needs_program=False,
    )
    _add_job(made)
    _add_pods(made)
    _add_storage(made)
    return made


def _add_job(parser: args.Parser) -> None:
    add = parser.add_argument_group("the job").add_argument
    add("--image", metavar="IMAGE:TAG", help="what runs in every pod")
    add("--name", metavar="NAME", help="of the job (default: that of the image)")
    add("--namespace", metavar="NAME", help="(default: that of whoever applies the file)")
    add(
        "--flavor",
        choices=FLAVORS,
        default="job",
        help="Kubernetes' own Job, Kubeflow's TFJob (v1) or TrainJob (Trainer v2) (default: job)",
    )
    add(
        "--runtime",
        metavar="NAME",
        help="for a TrainJob: a ClusterTrainingRuntime that is there (default: one is written)",
    )
    add(
        "--workers",
        type=args.whole(1, 1000),
        default=1,
        metavar="N",
        help="pods that train, the chief among them (default: 1)",
    )
    add("--ps", type=args.whole(0, 1000), default=0, metavar="N", help="parameter servers, for a TFJob")
    add("--evaluator", action="store_true", help="one more pod evaluates the checkpoints")
    add("--tensorboard", action="store_true", help="one more pod shows the curves")
    add(
        "--max_restarts",
        type=args.whole(0, 1000),
        default=3,
        metavar="N",
        help="how often all pods may start again after a loss (default: 3)",
    )
    add("--timeout", metavar="TIME", help="end the job after this, such as 24h (default: never)")
    add("--format", choices=("yaml", "json"), default="yaml", help="of the file (default: yaml)")


def _add_pods(parser: args.Parser) -> None:
    add = parser.add_argument_group("each pod").add_argument
    add("--cpu", default="2", metavar="N", help="CPUs, such as 2 or 500m (default: 2)")
    add("--memory", default="4Gi", metavar="SIZE", help="at most so much (default: 4Gi)")
    add("--gpus", type=args.whole(0, 16), default=0, metavar="N", help="NVIDIA GPUs (default: none)")
    add("--shm", default="1Gi", metavar="SIZE", help="of /dev/shm, counts as memory (default: 1Gi)")
    add(
        "--node_selector",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a label that the node has, with --gpus that of a pod with GPUs; repeatable",
    )
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable; repeatable")
    add(
        "--env_from_secret",
        action="append",
        default=[],
        metavar="NAME=SECRET:KEY",
        help="a variable whose value a Secret holds; repeatable",
    )
    add("--service_account", metavar="NAME", help="of the pods (default: the namespace's)")
    add(
        "--grace_secs",
        type=args.whole(1, 3600),
        default=120,
        metavar="SECS",
        help="seconds to save in, between SIGTERM and SIGKILL (default: 120)",
    )


def _add_storage(parser: args.Parser) -> None:
    add = parser.add_argument_group("a volume that all pods see").add_argument
    add("--claim", metavar="NAME", help="a PersistentVolumeClaim that is there")
    add("--storage", metavar="SIZE", help="a new one, such as 10Gi")
    add("--storage_class", metavar="NAME", help="of the new one (default: the cluster's)")
    add("--mount", default="/shared", metavar="PATH", help="where it is (default: /shared)")
