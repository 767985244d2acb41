"""Options of `ctl deploy kubernetes`."""

from ctl.deploy import args
from ctl.deploy.args import Option
from ctl.deploy.validators import integer_option, pattern_option, range_option

KUBERNETES_EXAMPLE = (
    "ctl deploy kubernetes --image=ghcr.io/me/flowers:1 --workers=2 --storage=10Gi "
    "-- python -m trainer.task --model_dir=/shared/flowers"
)
FLAVORS = ("job", "tfjob", "trainjob")
_SUBDOMAIN = "[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?"
_LABEL = "[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_object = pattern_option(_SUBDOMAIN, "not a Kubernetes name; expected lower-case letters, digits, - and .")
_namespace = pattern_option(
    "[a-z]([-a-z0-9]{0,61}[a-z0-9])?", "not a namespace; expected lower-case letters and digits"
)
job_name = (
    pattern_option(  # at most 63 characters with -node-0-999 or -tensorboard and Kubernetes' suffixes
        "[a-z]([-a-z0-9]{0,38}[a-z0-9])?",
        "not a job name; expected lower-case letters, digits and hyphens, a letter first, at most 40 "
        "characters, such as --name=flowers-1",
    )
)
_flavor = pattern_option("|".join(FLAVORS), f"an invalid choice; expected one of {', '.join(FLAVORS)}")
_cpu = pattern_option(
    r"[1-9][0-9]{0,3}(\.[0-9]+)?|0\.[0-9]+|[1-9][0-9]{0,6}m", "not a quantity; expected e.g. 2 or 500m"
)
_size = pattern_option(r"[1-9][0-9]*(\.[0-9]+)?([KMGT]i|[kMGT])", "not a quantity; expected e.g. 4Gi")
_selector = pattern_option(
    f"({_SUBDOMAIN}/)?{_LABEL}=({_LABEL})?",
    "not a label; expected KEY=VALUE, such as cloud.google.com/gke-accelerator=nvidia-tesla-t4",
)
_secret = pattern_option(
    rf"[A-Za-z_][A-Za-z0-9_]*={_SUBDOMAIN}:[-._a-zA-Z0-9]{{1,253}}",
    "not a reference to a Secret; expected NAME=SECRET:KEY, such as HF_TOKEN=hugging-face:token",
    hides_value=True,
)
_mount = pattern_option(r"(?!/dev/shm$)(/[\w.-]+)+", "not a mount path; expected a path such as /shared")


def parser() -> args.Parser:
    """Returns the parser of the options."""
    description = "Writes a Job, a TFJob or a TrainJob, and the objects that it requires."
    argument_parser = args.Parser("kubernetes", description, KUBERNETES_EXAMPLE, needs_program=False)
    argument_parser.add("the job", *args.job_options("pod", job_name))
    argument_parser.add(
        "Kubernetes",
        Option("--namespace", "namespace (default: that of the kubectl context)", "NAME", _namespace),
        Option("--flavor", "job, or Kubeflow's tfjob (v1) or trainjob (v2)", "KIND", _flavor, "job"),
        Option("--runtime", "existing ClusterTrainingRuntime for a trainjob", "NAME", _object),
        Option("--tensorboard", "add a pod with TensorBoard"),
        Option("--max_restarts", "restarts of all pods after a failure", "N", integer_option(0, 1000), 3),
        Option("--elastic", "elastic job, which continues while MIN pods remain", "MIN:MAX", range_option),
    )
    argument_parser.add(
        "each pod",
        Option("--cpu", "CPUs, such as 2 or 500m", "N", _cpu, "2"),
        Option("--memory", "memory limit", "SIZE", _size, "4Gi"),
        Option("--gpus", "NVIDIA GPUs (default: none)", "N", integer_option(0), 0),
        Option("--shm", "size of /dev/shm, part of the memory", "SIZE", _size, "1Gi"),
        Option(
            "--node_selector",
            "label of the nodes (only of those with GPUs if --gpus is set)",
            "KEY=VALUE",
            _selector,
            [],
        ),
        Option("--env_from_secret", "variable with a value from a Secret", "NAME=SECRET:KEY", _secret, []),
        Option(
            "--service_account",
            "service account of the pods (default: that of the namespace)",
            "NAME",
            _object,
        ),
        Option(
            "--grace_secs",
            "time from SIGTERM to SIGKILL for the checkpoint",
            "SECS",
            integer_option(1, 3600),
            120,
        ),
    )
    argument_parser.add(
        "shared volume",
        Option("--claim", "existing PersistentVolumeClaim", "NAME", _object),
        Option("--storage", "size of a new PersistentVolumeClaim, such as 10Gi", "SIZE", _size),
        Option(
            "--storage_class",
            "storage class of the new claim (default: that of the cluster)",
            "NAME",
            _object,
        ),
        Option("--mount", "mount path", "PATH", _mount, "/shared"),
    )
    return argument_parser
