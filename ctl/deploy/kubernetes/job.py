"""One job on Kubernetes, read from the command line and checked; each mistake is one sentence."""

import re
from argparse import Namespace
from dataclasses import dataclass

from ctl.deploy import checks, validators
from ctl.deploy.args import CommandLine
from ctl.deploy.kubernetes.options import job_name
from ctl.errors import UsageError

_SET_BY_RUNTIME = (
    "max_restarts",
    "grace_secs",
    "node_selector",
    "service_account",
    "shm",
    "mount",
    "tensorboard",
    "claim",
    "storage",
)


@dataclass(frozen=True)
class Job:
    """What the templates need beside the options.

    Attributes:
      line: the command line.
      name: of the job, and the beginning of all other names.
      env: variables by name.
      secrets: variables by name, each as SECRET:KEY.
      claim: the PersistentVolumeClaim, or "" for none.
      logdir: what TensorBoard shows, or "" without one.
    """

    line: CommandLine
    name: str
    env: dict[str, str]
    secrets: dict[str, str]
    claim: str
    logdir: str

    @property
    def options(self) -> Namespace:
        """The options of the line."""
        return self.line.options

    @property
    def has_peers(self) -> bool:
        """Whether processes talk to each other."""
        return self.options.workers + self.options.ps > 1

    @property
    def is_indexed(self) -> bool:
        """Whether the pods of a Job find each other by index."""
        return self.options.workers > 1 or self.options.evaluator


def read(line: CommandLine) -> Job:
    """The job of a command line; UsageError for options that do not fit together."""
    options = line.options
    _check_flavor(line)
    _check_volume(options)
    last = options.image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    name = options.name or validators.checked("--name", job_name, re.sub("[._]+", "-", last))
    env, secrets = (
        validators.variables(options.env),
        validators.pairs("--env_from_secret", options.env_from_secret),
    )
    for variable in secrets:
        if variable in env or variable in validators.IDENTITY_VARIABLES:
            raise UsageError(f"--env_from_secret={variable} is set elsewhere, too; expected one value")
    claim = f"{name}-shared" if options.storage else options.claim or ""
    job = Job(line, name, env, secrets, claim, _logdir(line))
    _check_model_dir(job)
    return job


def _check_flavor(line: CommandLine) -> None:
    options = line.options
    if options.ps and options.flavor != "tfjob":
        raise UsageError(
            f"--ps={options.ps} came with --flavor={options.flavor}; expected --flavor=tfjob, whose "
            "operator knows parameter servers"
        )
    checks.check_parameter_servers(line)
    if options.runtime is None:
        return
    if options.flavor != "trainjob":
        raise UsageError(f"--runtime came with --flavor={options.flavor}; expected --flavor=trainjob")
    given = {word.partition("=")[0] for word in line.words}
    for option in _SET_BY_RUNTIME:
        if f"--{option}" in given:
            raise UsageError(
                f"--{option} came with --runtime={options.runtime}, which defines its pods and their "
                "volumes; leave it out, or leave --runtime out and one is written"
            )


def _check_volume(options: Namespace) -> None:
    if options.claim and options.storage:
        raise UsageError(
            "--claim came with --storage; expected an existing volume, or the size of a new one"
        )
    if options.storage_class and not options.storage:
        raise UsageError("--storage_class came without --storage=SIZE; it is for a new volume")


def _logdir(line: CommandLine) -> str:
    if not line.options.tensorboard:
        return ""
    model_dir = line.flag("model_dir")
    if model_dir is None:
        raise UsageError(
            "--tensorboard needs to know where the curves are; expected --model_dir=PATH "
            "among the flags of the program"
        )
    if "://" in model_dir:
        raise UsageError(
            f"--tensorboard came with --model_dir={model_dir}; ctl writes curves to directories, not to "
            "URLs. Expected a path on a volume, such as /shared/flowers with --storage=10Gi"
        )
    return f"{model_dir.rstrip('/')}/logs"


def _check_model_dir(job: Job) -> None:
    options, model_dir = job.options, job.line.flag("model_dir")
    if options.evaluator and model_dir is None and job.line.program:
        raise UsageError(
            "--evaluator needs the checkpoints; expected --model_dir=PATH among the flags of the program"
        )
    if model_dir is None or "://" in model_dir:
        return
    if options.runtime:
        if options.evaluator:
            raise UsageError(
                f"--evaluator came with --runtime={options.runtime} and --model_dir={model_dir}; its pod "
                "has none of that runtime's volumes. Expected gs://BUCKET/PATH, or leave --runtime out"
            )
        return
    is_on_volume = f"{model_dir}/".startswith(f"{options.mount}/")
    if is_on_volume and not job.claim:
        raise UsageError(
            f"--model_dir={model_dir} is on {options.mount}, but nothing is mounted there; expected "
            "--storage=10Gi for a new volume, or --claim=NAME"
        )
    is_shared = job.has_peers or options.evaluator or job.logdir
    if is_shared and not is_on_volume:
        raise UsageError(
            f"--model_dir={model_dir} is inside one pod, and the others do not see it; expected a path "
            f"below {options.mount} with --storage or --claim, or gs://BUCKET/PATH"
        )


def warnings(job: Job) -> list[str]:
    """What looks wrong and may still be meant."""
    model_dir, options = job.line.flag("model_dir"), job.options
    found = checks.warnings(job.line, "--ps=N and --flavor=tfjob")
    gpu_labels = [
        pair for pair in options.node_selector if re.search("gpu|accelerator", pair.partition("=")[0])
    ]
    if gpu_labels and not options.gpus:
        found.append(
            f"--node_selector={gpu_labels[0]} came without --gpus=N; nodes with GPUs turn away pods without"
        )
    if job.line.program and model_dir is None:
        found.append("the program has no --model_dir: nothing is kept, and a restart begins anew")
    if model_dir and not job.claim and "://" not in model_dir and not options.runtime:
        found.append(f"--model_dir={model_dir} is inside the pod and is lost with it")
    return found
