"""The options of `ctl deploy kubernetes`: what they are called, what they mean, which values they take."""

from ctl.deploy import args
from ctl.deploy.validators import form, whole

EXAMPLE = (
    "ctl deploy kubernetes --image=ghcr.io/me/flowers:1 --workers=2 --storage=10Gi "
    "-- python -m trainer.task --model_dir=/shared/flowers"
)
FLAVORS = ("job", "tfjob", "trainjob")
_SUBDOMAIN = "[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?"
_LABEL = "[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_SIZE = r"[1-9][0-9]*(\.[0-9]+)?([KMGT]i|[kMGT])"
_object = form(_SUBDOMAIN, "no name of Kubernetes; expected lower-case letters, digits, - and .")


def _label_name(most: int) -> str:
    return rf"(?=.{{1,{most}}}$)[a-z]([-a-z0-9]*[a-z0-9])?"


# with -node-0-999 or -tensorboard and what Kubernetes adds, at most 63
job_name = form(
    _label_name(40),
    "no name of a job; expected lower-case letters, digits and hyphens, a letter first, at most 40 "
    "characters, such as flowers-1",
)


def parser() -> args.Parser:
    """The parser of the options."""
    description = "Writes a Job, a TFJob or a TrainJob, and the objects that it needs."
    made = args.Parser("kubernetes", description, EXAMPLE, needs_program=False)
    args.add_job_options(made, "pod", job_name)
    add = made.add_argument_group("Kubernetes").add_argument
    namespace = form(_label_name(63), "no namespace; expected lower-case letters, digits and hyphens")
    add("--namespace", type=namespace, metavar="NAME", help="(default: that of whoever applies the file)")
    help = "Kubernetes' own Job, Kubeflow's TFJob (v1) or TrainJob (Trainer v2) (default: job)"
    add("--flavor", choices=FLAVORS, default="job", help=help)
    help = "for a TrainJob: an existing ClusterTrainingRuntime (default: one is written)"
    add("--runtime", type=_object, metavar="NAME", help=help)
    add("--tensorboard", action="store_true", help="one more pod shows the curves")
    help = "how often all pods may start again after a loss (default: 3)"
    add("--max_restarts", type=whole(0, 1000), default=3, metavar="N", help=help)
    _add_pods(made)
    _add_storage(made)
    return made


def _add_pods(parser: args.Parser) -> None:
    add = parser.add_argument_group("each pod").add_argument
    cpu = form(
        r"[1-9][0-9]{0,3}(\.[0-9]+)?|0\.[0-9]+|[1-9][0-9]{0,6}m", "no quantity; expected e.g. 2 or 500m"
    )
    add("--cpu", type=cpu, default="2", metavar="N", help="CPUs, such as 2 or 500m (default: 2)")
    size = form(_SIZE, "no quantity; expected e.g. 4Gi")
    add("--memory", type=size, default="4Gi", metavar="SIZE", help="at most so much (default: 4Gi)")
    add("--gpus", type=whole(0), default=0, metavar="N", help="NVIDIA GPUs (default: none)")
    add(
        "--shm",
        type=size,
        default="1Gi",
        metavar="SIZE",
        help="/dev/shm, part of the memory (default: 1Gi)",
    )
    label = form(
        f"({_SUBDOMAIN}/)?{_LABEL}=({_LABEL})?",
        "no label; expected KEY=VALUE, such as cloud.google.com/gke-accelerator=nvidia-tesla-t4",
    )
    help = "a label of the nodes to run on; with --gpus, of the pods with GPUs only; repeatable"
    add("--node_selector", type=label, action="append", default=[], metavar="KEY=VALUE", help=help)
    secret = form(
        rf"[A-Za-z_][A-Za-z0-9_]*={_SUBDOMAIN}:[-._a-zA-Z0-9]{{1,253}}",
        "no variable of a Secret; expected NAME=SECRET:KEY, such as HF_TOKEN=hugging-face:token",
        hides_value=True,
    )
    help = "a variable whose value a Secret holds; repeatable"
    add("--env_from_secret", type=secret, action="append", default=[], metavar="NAME=SECRET:KEY", help=help)
    add("--service_account", type=_object, metavar="NAME", help="of the pods (default: the namespace's)")
    help = "between SIGTERM and SIGKILL, to save in (default: 120)"
    add("--grace_secs", type=whole(1, 3600), default=120, metavar="SECS", help=help)


def _add_storage(parser: args.Parser) -> None:
    add = parser.add_argument_group("a volume that all pods see").add_argument
    add("--claim", type=_object, metavar="NAME", help="an existing PersistentVolumeClaim")
    size = form(_SIZE, "no quantity; expected e.g. 10Gi")
    add("--storage", type=size, metavar="SIZE", help="a new one, such as 10Gi")
    add("--storage_class", type=_object, metavar="NAME", help="of the new one (default: the cluster's)")
    mount = form(r"(?!/dev/shm$)(/[\w.-]+)+", "no place for a volume; expected a path such as /shared")
    add("--mount", type=mount, default="/shared", metavar="PATH", help="where it is (default: /shared)")
