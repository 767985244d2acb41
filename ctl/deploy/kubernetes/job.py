"""Validated settings of one Kubernetes job. Each error message is one sentence."""

import re
from argparse import Namespace
from dataclasses import dataclass

from ctl.deploy import checks, validators
from ctl.deploy.args import CommandLine
from ctl.deploy.kubernetes import elastic
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
    if options.elastic:
        elastic.check_elastic_job(line)
    if options.claim and options.storage:
        raise UsageError(
            "--claim cannot be combined with --storage; expected an existing volume, or a size for a new "
            "one"
        )
    if options.storage_class and not options.storage:
        raise UsageError(
            "--storage_class applies to a new volume and cannot be used without --storage=SIZE"
        )
    image_name = options.image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    name = options.name or job_name(re.sub("[._]+", "-", image_name))
    env = validators.parse_variables(options.env)
    secrets = validators.parse_assignments("--env_from_secret", options.env_from_secret)
    for variable in secrets:
        if variable in env or variable in validators.IDENTITY_VARIABLES:
            raise UsageError(
                f"--env_from_secret={variable} is set elsewhere; expected one value per variable"
            )
    claim = f"{name}-shared" if options.storage else options.claim or ""
    job = KubernetesJob(line, name, env, secrets, claim, _find_logdir(line))
    _check_model_dir(job)
    return job


def _check_flavor(line: CommandLine) -> None:
    options, problem = line.options, f"cannot be used with --flavor={line.options.flavor}"
    checks.check_parameter_servers(line)
    if options.ps and options.flavor != "tfjob":
        raise UsageError(
            f"--ps {problem}; expected --flavor=tfjob, whose operator supports parameter servers"
        )
    if options.runtime is None:
        return
    if options.flavor != "trainjob":
        raise UsageError(f"--runtime {problem}; expected --flavor=trainjob")
    for option in {argument.partition("=")[0] for argument in line.arguments} & _SET_BY_RUNTIME:
        problem = f"{option} cannot be used with --runtime={options.runtime}"
        problem += ", which defines its pods and their volumes"
        raise UsageError(f"{problem}; omit it, or omit --runtime to generate a runtime")


def _find_logdir(line: CommandLine) -> str:
    """Returns the log directory of TensorBoard. ctl writes curves to directories only."""
    model_dir = line.flag("model_dir")
    if not line.options.tensorboard:
        return ""
    if model_dir is None:
        raise UsageError("--tensorboard requires --model_dir=PATH among the flags of the program")
    if "://" in model_dir:
        problem = f"--tensorboard cannot be used with --model_dir={model_dir}"
        problem += ": ctl writes curves to directories, not to URLs"
        raise UsageError(f"{problem}. Expected a path on a volume, such as /shared/flowers")
    return f"{model_dir.rstrip('/')}/logs"


def _check_model_dir(job: KubernetesJob) -> None:
    options, model_dir = job.options, job.line.flag("model_dir")
    if options.evaluator and model_dir is None and job.line.program:
        raise UsageError(
            "--evaluator requires the checkpoints; expected --model_dir=PATH among the flags of the program"
        )
    if model_dir is None or "://" in model_dir:
        return
    problem = f"--model_dir={model_dir}"
    if options.runtime and options.evaluator:
        problem = f"--evaluator cannot be used with --runtime={options.runtime} and {problem}"
        problem += ": its pod has none of that runtime's volumes"
        raise UsageError(f"{problem}. Expected gs://BUCKET/PATH, or omit --runtime")
    if options.runtime:
        return
    is_on_volume = f"{model_dir}/".startswith(f"{options.mount}/")
    volume = "--storage=10Gi for a new volume, or --claim=NAME"
    if is_on_volume and not job.claim:
        raise UsageError(
            f"{problem} is on {options.mount}, but no volume is mounted there; expected {volume}"
        )
    if job.shares_checkpoints and not is_on_volume:
        expected = f"a path below {options.mount} with {volume}, or gs://BUCKET/PATH"
        raise UsageError(
            f"{problem} is local to one pod, and the other pods cannot access it; expected {expected}"
        )


def job_warnings(job: KubernetesJob) -> list[str]:
    """Returns warnings for probable mistakes."""
    model_dir, options = job.line.flag("model_dir"), job.options
    warnings = checks.program_warnings(job.line, "--ps=N and --flavor=tfjob")
    gpu_labels = [pair for pair in options.node_selector if re.search("(gpu|accelerator).*=", pair)]
    if gpu_labels and not options.gpus:
        problem = f"--node_selector={gpu_labels[0]} was given without --gpus=N"
        warnings.append(f"{problem}; nodes with GPUs reject pods without GPUs")
    if job.line.program and model_dir is None:
        warnings.append(
            "the program has no --model_dir: no checkpoint is saved, and a restart begins at step 0"
        )
    if model_dir and not job.claim and "://" not in model_dir and not options.runtime:
        warnings.append(f"--model_dir={model_dir} is local to the pod and is lost with it")
    return warnings
