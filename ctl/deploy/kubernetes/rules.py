"""What Kubernetes and its operators ask for, checked before a file is written; one sentence each."""

import argparse
import re
from collections.abc import Mapping, Sequence

from ctl.deploy import lint, validators
from ctl.deploy.args import Asked
from ctl.deploy.kubernetes.setting import GPU, Care, Program, Roles, Setting, Storage
from ctl.errors import UsageError
from ctl.io.console import quoted

_MOST_NAME = 40  # with -node-0-999 or -tensorboard and what Kubernetes adds, at most 63
_OF_A_RUNTIME = (
    "--max_restarts",
    "--grace_secs",
    "--node_selector",
    "--service_account",
    "--shm",
    "--mount",
    "--tensorboard",
)
_MEMORY = re.compile(r"[1-9][0-9]*(\.[0-9]+)?([KMGT]i|[kMGT])")
_CPU = re.compile(r"[1-9][0-9]{0,3}(\.[0-9]+)?|0\.[0-9]+|[1-9][0-9]{0,6}m")
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?"
_SECRET = re.compile(rf"([A-Za-z_][A-Za-z0-9_]*)=({_SUBDOMAIN}):([-._a-zA-Z0-9]{{1,253}})")
_LABEL = re.compile(
    rf"(?:({_SUBDOMAIN})/)?[A-Za-z0-9]([-._A-Za-z0-9]{{0,61}}[A-Za-z0-9])?"
    r"=([A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?)?"
)


def setting(asked: Asked) -> Setting:
    """The job asked for; UsageError for what cannot be."""
    options = asked.options
    name = validators.label_name("--name", options.name or _name_of(options.image), _MOST_NAME)
    namespace = ""
    if options.namespace is not None:
        namespace = validators.label_name("--namespace", options.namespace, 63)
    roles = _roles(asked)
    storage = _storage(options, name)
    made = Setting(
        name=name,
        namespace=namespace,
        roles=roles,
        program=_program(asked),
        storage=storage,
        care=_care(options),
        logdir=_logdir(asked),
        runtime=options.runtime or "",
    )
    _check_model_dir(asked, made)
    return made


def _name_of(image: str) -> str:
    last = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return re.sub("[._]+", "-", last)


def _roles(asked: Asked) -> Roles:
    options = asked.options
    if options.ps and options.flavor != "tfjob":
        raise UsageError(
            f"--ps={options.ps} came with --flavor={options.flavor}; expected --flavor=tfjob, whose "
            "operator knows parameter servers"
        )
    if options.ps and options.workers < 2:
        raise UsageError(
            f"--ps={options.ps} came with --workers=1, the chief, which does not train then; expected "
            "--workers=2 or more"
        )
    if options.runtime is not None and options.flavor != "trainjob":
        raise UsageError(f"--runtime came with --flavor={options.flavor}; expected --flavor=trainjob")
    for option in _OF_A_RUNTIME if options.runtime else ():
        if any(word.partition("=")[0] == option for word in asked.words):
            raise UsageError(
                f"{option} came with --runtime={options.runtime}, which says what its pods are like and "
                "which volumes there are; leave it out, or leave --runtime out and one is written"
            )
    return Roles(options.workers, options.ps, options.evaluator)


def _program(asked: Asked) -> Program:
    options = asked.options
    env = validators.variables(options.env, "kubernetes")
    hidden = _secrets(options.env_from_secret, env)
    requests = {"cpu": _quantity("--cpu", options.cpu, _CPU, "2 or 500m")}
    requests["memory"] = _quantity("--memory", options.memory, _MEMORY, "4Gi")
    limits = {"memory": options.memory}
    if options.gpus:
        limits[GPU] = str(options.gpus)
    resources = {"requests": requests, "limits": limits}
    return Program(options.image, asked.command, asked.args, env, hidden, resources)


def _secrets(given: Sequence[str], env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for text in given:
        read = _SECRET.fullmatch(text)
        name = text.partition("=")[0]
        if not read:
            raise UsageError(
                f"--env_from_secret={quoted(name)} cannot be read; expected NAME=SECRET:KEY, where a "
                "Secret has the key, such as HF_TOKEN=hugging-face:token"
            )
        if name in found or name in env or name in validators.WHO_AM_I:
            raise UsageError(f"--env_from_secret={name} is set elsewhere, too; expected one value")
        found[name] = (read[2], read[4])
    return found


def _quantity(option: str, text: str, form: re.Pattern[str], example: str) -> str:
    if not form.fullmatch(text):
        raise UsageError(f"{option}={quoted(text)} is no quantity; expected e.g. {example}")
    return text


def _storage(options: argparse.Namespace, name: str) -> Storage:
    if options.claim and options.storage:
        raise UsageError(
            "--claim came with --storage; expected one that is there, or the size of a new one"
        )
    if options.storage_class and not options.storage:
        raise UsageError("--storage_class came without --storage=SIZE; it is for a new volume")
    if options.runtime and (options.claim or options.storage):
        raise UsageError(
            "--runtime came with a volume; that runtime says which volumes there are, so leave it out, or "
            "leave --runtime out and one is written"
        )
    if not re.fullmatch(r"(/[\w.-]+)+", options.mount) or options.mount == "/dev/shm":
        raise UsageError(
            f"--mount={quoted(options.mount)} is no place for a volume; expected a path such as /shared"
        )
    size = _quantity("--storage", options.storage, _MEMORY, "10Gi") if options.storage else ""
    claim = f"{name}-shared" if size else options.claim or ""
    for option, text in (("--claim", options.claim), ("--storage_class", options.storage_class)):
        if text is not None and not re.fullmatch(_SUBDOMAIN, text):
            raise UsageError(
                f"{option}={quoted(text)} is no name of Kubernetes; expected lower-case "
                "letters, digits, - and ."
            )
    shm = _quantity("--shm", options.shm, _MEMORY, "1Gi")
    return Storage(claim, size, options.storage_class or "", options.mount, shm)


def _care(options: argparse.Namespace) -> Care:
    labels: dict[str, str] = {}
    for text in options.node_selector:
        if not _LABEL.fullmatch(text):
            raise UsageError(
                f"--node_selector={quoted(text)} is no label; expected KEY=VALUE, such as "
                "cloud.google.com/gke-accelerator=nvidia-tesla-t4"
            )
        labels[text.partition("=")[0]] = text.partition("=")[2]
    account = options.service_account or ""
    if account and not re.fullmatch(_SUBDOMAIN, account):
        raise UsageError(
            f"--service_account={quoted(account)} is no name of Kubernetes; expected e.g. trainer"
        )
    secs = validators.seconds("--timeout", options.timeout) if options.timeout else None
    return Care(options.max_restarts, options.grace_secs, secs, account, labels)


def _logdir(asked: Asked) -> str:
    if not asked.options.tensorboard:
        return ""
    model_dir = asked.flag("model_dir")
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


def _check_model_dir(asked: Asked, made: Setting) -> None:
    model_dir, storage = asked.flag("model_dir"), made.storage
    if made.roles.evaluator and model_dir is None and asked.program:
        raise UsageError(
            "--evaluator needs the checkpoints; expected --model_dir=PATH among the flags of the program"
        )
    if model_dir is None or "://" in model_dir:
        return
    if made.runtime:
        if made.roles.evaluator:
            raise UsageError(
                f"--evaluator came with --runtime={made.runtime} and --model_dir={model_dir}; its pod has "
                "none of that runtime's volumes. Expected gs://BUCKET/PATH, or leave --runtime out"
            )
        return
    is_on_volume = f"{model_dir}/".startswith(f"{storage.mount}/")
    if is_on_volume and not storage.claim:
        raise UsageError(
            f"--model_dir={model_dir} is on {storage.mount}, but nothing is mounted there; expected "
            "--storage=10Gi for a new volume, or --claim=NAME"
        )
    is_shared = made.roles.has_peers or made.roles.evaluator or made.logdir
    if is_shared and not is_on_volume:
        raise UsageError(
            f"--model_dir={model_dir} is inside one pod, and the others do not see it; expected a path "
            f"below {storage.mount} with --storage or --claim, or gs://BUCKET/PATH"
        )


def warnings(asked: Asked, made: Setting) -> list[str]:
    """What looks wrong and may still be meant."""
    model_dir, roles = asked.flag("model_dir"), made.roles
    found = lint.strategy(
        asked, ps=roles.ps, workers=roles.workers, each="pods", cure="give --ps=N and --flavor=tfjob"
    )
    gpu_nodes = [k for k in made.care.node_selector if re.search("gpu|accelerator", k)]
    if gpu_nodes and not made.program.has_gpus:
        found.append(
            f"--node_selector={gpu_nodes[0]}=… came without --gpus=N; nodes with GPUs turn away "
            "pods without"
        )
    if not asked.program:
        found.append(lint.NO_PROGRAM)
    elif model_dir is None:
        found.append("the program has no --model_dir: nothing is kept, and a restart begins anew")
    elif not made.storage.claim and "://" not in model_dir and not asked.options.runtime:
        found.append(f"--model_dir={model_dir} is inside the pod and is lost with it")
    return found
