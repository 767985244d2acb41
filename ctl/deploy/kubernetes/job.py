"""Validated settings of one Kubernetes job. Each error message is one sentence."""

import re
from argparse import Namespace
from dataclasses import dataclass

from ctl.deploy import checks, validators
from ctl.deploy.args import CommandLine
from ctl.deploy.kubernetes.options import job_name
from ctl.errors import UsageError

_SET_BY_RUNTIME = frozenset((
    "--max_restarts", "--grace_secs", "--node_selector", "--service_account", "--shm", "--mount",
    "--tensorboard", "--claim", "--storage",
))  # fmt: skip


@dataclass(frozen=True)
class KubernetesJob:
    """Values for the templates in addition to the options.

    Attributes:
      line: The command line.
      name: Name of the job and prefix of all other names.
      env: Variable name -> value.
      secrets: Variable name -> SECRET:KEY.
      claim: Name of the PersistentVolumeClaim, or "" for none.
      logdir: Log directory of TensorBoard, or "" without TensorBoard.
    """

    line: CommandLine
    name: str
    env: dict[str, str]
    secrets: dict[str, str]
    claim: str
    logdir: str

    @property
    def options(self) -> Namespace:
        """The options of the command line."""
        return self.line.options

    @property
    def has_peers(self) -> bool:
        """True if the processes communicate."""
        return self.options.workers + self.options.ps > 1

    @property
    def is_indexed(self) -> bool:
        """True if the pods of a Job find their peers by index."""
        return self.options.workers > 1 or self.options.evaluator

    @property
    def shares_checkpoints(self) -> bool:
        """True if several pods use the checkpoints."""
        return bool(self.has_peers or self.options.evaluator or self.logdir)


def read_job(line: CommandLine) -> KubernetesJob:
    """Returns the job of a command line. Raises UsageError for incompatible options."""
    options = line.options
    _check_flavor(line)
    if options.claim and options.storage:
        raise UsageError(
            "--claim came with --storage; expected an existing volume, or a size for a new one"
        )
    if options.storage_class and not options.storage:
        raise UsageError("--storage_class came without --storage=SIZE; it is for a new volume")
    last = options.image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    name = options.name or job_name(re.sub("[._]+", "-", last))
    env = validators.variables(options.env)
    secrets = validators.named_values("--env_from_secret", options.env_from_secret)
    for variable in secrets:
        if variable in env or variable in validators.IDENTITY_VARIABLES:
            raise UsageError(f"--env_from_secret={variable} is set elsewhere, too; expected one value")
    claim = f"{name}-shared" if options.storage else options.claim or ""
    job = KubernetesJob(line, name, env, secrets, claim, _logdir(line))
    _check_model_dir(job)
    return job


def _check_flavor(line: CommandLine) -> None:
    options, came = line.options, f"came with --flavor={line.options.flavor}"
    checks.check_parameter_servers(line)
    if options.ps and options.flavor != "tfjob":
        raise UsageError(f"--ps {came}; expected --flavor=tfjob, whose operator knows parameter servers")
    if options.runtime is None:
        return
    if options.flavor != "trainjob":
        raise UsageError(f"--runtime {came}; expected --flavor=trainjob")
    for option in {word.partition("=")[0] for word in line.words} & _SET_BY_RUNTIME:
        came = f"{option} came with --runtime={options.runtime}, which defines its pods and their volumes"
        raise UsageError(f"{came}; leave it out, or leave --runtime out and one is written")


def _logdir(line: CommandLine) -> str:
    """Returns the log directory of TensorBoard. ctl writes curves to directories only."""
    model_dir = line.flag("model_dir")
    if not line.options.tensorboard:
        return ""
    if model_dir is None:
        raise UsageError("--tensorboard needs --model_dir=PATH among the flags of the program")
    if "://" in model_dir:
        came = f"--tensorboard came with --model_dir={model_dir}; ctl writes curves to directories, not to"
        raise UsageError(f"{came} URLs. Expected a path on a volume, such as /shared/flowers")
    return f"{model_dir.rstrip('/')}/logs"


def _check_model_dir(job: KubernetesJob) -> None:
    options, model_dir = job.options, job.line.flag("model_dir")
    if options.evaluator and model_dir is None and job.line.program:
        raise UsageError("--evaluator needs the checkpoints; expected --model_dir=PATH as its flag")
    if model_dir is None or "://" in model_dir:
        return
    came = f"--model_dir={model_dir}"
    if options.runtime and options.evaluator:
        came = f"--evaluator came with --runtime={options.runtime} and {came}"
        came += "; its pod has none of that runtime's volumes"
        raise UsageError(f"{came}. Expected gs://BUCKET/PATH, or leave --runtime out")
    if options.runtime:
        return
    is_on_volume = f"{model_dir}/".startswith(f"{options.mount}/")
    volume = "--storage=10Gi for a new volume, or --claim=NAME"
    if is_on_volume and not job.claim:
        raise UsageError(f"{came} is on {options.mount}, but nothing is mounted there; expected {volume}")
    if job.shares_checkpoints and not is_on_volume:
        expected = f"a path below {options.mount} with {volume}, or gs://BUCKET/PATH"
        raise UsageError(f"{came} is inside one pod, and the others do not see it; expected {expected}")


def job_warnings(job: KubernetesJob) -> list[str]:
    """Returns warnings for probable mistakes."""
    model_dir, options = job.line.flag("model_dir"), job.options
    found = checks.program_warnings(job.line, "--ps=N and --flavor=tfjob")
    gpu_labels = [pair for pair in options.node_selector if re.search("(gpu|accelerator).*=", pair)]
    if gpu_labels and not options.gpus:
        came = f"--node_selector={gpu_labels[0]} came without --gpus=N"
        found.append(f"{came}; nodes with GPUs turn away pods without")
    if job.line.program and model_dir is None:
        found.append("the program has no --model_dir: nothing is kept, and a restart begins anew")
    if model_dir and not job.claim and "://" not in model_dir and not options.runtime:
        found.append(f"--model_dir={model_dir} is inside the pod and is lost with it")
    return found
