"""Options of `ctl deploy kubernetes`."""

from ctl.deploy import args
from ctl.deploy.args import Option
from ctl.deploy.validators import form, whole_option

KUBERNETES_EXAMPLE = (
    "ctl deploy kubernetes --image=ghcr.io/me/flowers:1 --workers=2 --storage=10Gi "
    "-- python -m trainer.task --model_dir=/shared/flowers"
)
FLAVORS = ("job", "tfjob", "trainjob")
_SUBDOMAIN = "[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?"
_LABEL = "[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_object = form(_SUBDOMAIN, "no name of Kubernetes; expected lower-case letters, digits, - and .")
_namespace = form("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "no namespace; expected lower-case letters and digits")
job_name = form(  # with -node-0-999 or -tensorboard and the suffixes of Kubernetes, at most 63 characters
    "[a-z]([-a-z0-9]{0,38}[a-z0-9])?",
    "no name of a job; expected lower-case letters, digits and hyphens, a letter first, at most 40 "
    "characters, such as --name=flowers-1",
)
_flavor = form("|".join(FLAVORS), f"an invalid choice; expected one of {', '.join(FLAVORS)}")
_cpu = form(
    r"[1-9][0-9]{0,3}(\.[0-9]+)?|0\.[0-9]+|[1-9][0-9]{0,6}m", "no quantity; expected e.g. 2 or 500m"
)
_size = form(r"[1-9][0-9]*(\.[0-9]+)?([KMGT]i|[kMGT])", "no quantity; expected e.g. 4Gi")
_selector = form(
    f"({_SUBDOMAIN}/)?{_LABEL}=({_LABEL})?",
    "no label; expected KEY=VALUE, such as cloud.google.com/gke-accelerator=nvidia-tesla-t4",
)
_secret = form(
    rf"[A-Za-z_][A-Za-z0-9_]*={_SUBDOMAIN}:[-._a-zA-Z0-9]{{1,253}}",
    "no variable of a Secret; expected NAME=SECRET:KEY, such as HF_TOKEN=hugging-face:token",
    hides_value=True,
)
_mount = form(r"(?!/dev/shm$)(/[\w.-]+)+", "no place for a volume; expected a path such as /shared")


def parser() -> args.Parser:
    """Returns the parser of the options."""
    description = "Writes a Job, a TFJob or a TrainJob, and the objects that it needs."
    made = args.Parser("kubernetes", description, KUBERNETES_EXAMPLE, needs_program=False)
    made.add("the job", *args.job_options("pod", job_name))
    made.add(
        "Kubernetes",
        Option("--namespace", "(default: that of whoever applies the file)", "NAME", _namespace),
        Option("--flavor", "job, or Kubeflow's tfjob (v1), trainjob (v2)", "KIND", _flavor, "job"),
        Option("--runtime", "of a trainjob: an existing ClusterTrainingRuntime", "NAME", _object),
        Option("--tensorboard", "one more pod shows the curves"),
        Option("--max_restarts", "of all pods, after a loss", "N", whole_option(0, 1000), 3),
    )
    made.add(
        "each pod",
        Option("--cpu", "CPUs, such as 2 or 500m", "N", _cpu, "2"),
        Option("--memory", "at most so much", "SIZE", _size, "4Gi"),
        Option("--gpus", "NVIDIA GPUs (default: none)", "N", whole_option(0), 0),
        Option("--shm", "/dev/shm, part of the memory", "SIZE", _size, "1Gi"),
        Option(
            "--node_selector", "a label of the nodes, of those with GPUs if any", "KEY=VALUE", _selector, []
        ),
        Option("--env_from_secret", "a variable that a Secret holds", "NAME=SECRET:KEY", _secret, []),
        Option("--service_account", "of the pods (default: the namespace's)", "NAME", _object),
        Option("--grace_secs", "from SIGTERM to SIGKILL, to save in", "SECS", whole_option(1, 3600), 120),
    )
    made.add(
        "a volume that all pods see",
        Option("--claim", "an existing PersistentVolumeClaim", "NAME", _object),
        Option("--storage", "a new one, such as 10Gi", "SIZE", _size),
        Option("--storage_class", "of the new one (default: the cluster's)", "NAME", _object),
        Option("--mount", "where it is", "PATH", _mount, "/shared"),
    )
    return made
