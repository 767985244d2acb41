"""The `ctl deploy kubernetes` command: one file for `kubectl apply`."""

import shlex
from collections.abc import Sequence

from ctl.deploy import args, lint, output, texts, validators
from ctl.deploy.args import Asked
from ctl.deploy.kubernetes import flavors, resources, rules
from ctl.deploy.kubernetes import options as kubernetes_options
from ctl.deploy.kubernetes.setting import JOBSET, LABEL, Setting
from ctl.deploy.output import Advice
from ctl.errors import UsageError

LINE = "ctl/command-line"  # an annotation
_JOBS = ("Job", "TFJob", "TrainJob")
_KEPT = ("PersistentVolumeClaim",)


def main(argv: Sequence[str]) -> int:
    """Writes the manifest; returns 0, or 2 after one sentence on stderr, when nothing was written."""
    return args.guarded("kubernetes", lambda: _main(argv))


def _main(argv: Sequence[str]) -> None:
    asked = args.read(kubernetes_options.parser(), argv)
    if asked is None:
        return
    if not asked.options.image:
        raise UsageError(
            "--image is missing; expected the image that `ctl deploy docker` is for, e.g. "
            f"{kubernetes_options.EXAMPLE}"
        )
    validators.image(asked.options.image)
    setting = rules.setting(asked)
    documents = made(setting, asked.options.flavor)
    end = _end(setting, documents)
    advice = Advice(
        fill_in=_fill_in(asked, setting),
        warnings=rules.warnings(asked, setting),
        notes=_notes(asked, setting, end),
        commands=_commands(asked, setting),
    )
    if asked.options.format == "json":
        _keep_line(setting, documents, asked.line())
        text = texts.as_json({"apiVersion": "v1", "kind": "List", "items": documents})
    else:
        text = texts.as_yaml(documents, texts.header(asked.line(), advice.fill_in))
    output.deliver(
        text, asked.options.output, advice, force=asked.options.force, default=f"job.{asked.options.format}"
    )


def made(setting: Setting, flavor: str) -> list[texts.Document]:
    """All objects, in the order in which they are wanted: storage, who may reach whom, the job."""
    if flavor == "job":
        job = flavors.job(setting)
    elif flavor == "tfjob":
        job = flavors.tfjob(setting)
    else:
        job = flavors.trainjob(setting)
    return [*resources.claim(setting), *resources.policies(setting), *job, *resources.tensorboard(setting)]


def _keep_line(setting: Setting, documents: list[texts.Document], line: str) -> None:
    """JSON has no comments: the line that writes the file again becomes an annotation of the job."""
    for document in documents:
        if document["kind"] in _JOBS and document["metadata"]["name"] == setting.name:
            document["metadata"]["annotations"] = {LINE: line}


def _end(setting: Setting, documents: list[texts.Document]) -> str:
    """The command that ends all, and spares a volume."""
    kinds = dict.fromkeys(d["kind"].lower() for d in documents if d["kind"] not in _KEPT)
    place = [f"--namespace={setting.namespace}"] if setting.namespace else []
    mine = f"--selector={LABEL}instance={setting.name}"
    return shlex.join(["kubectl", "delete", ",".join(kinds), *place, mine])


def _fill_in(asked: Asked, setting: Setting) -> list[str]:
    found = validators.blanks([setting.program.image, *setting.program.args])
    if asked.options.claim:
        found.append(f"PersistentVolumeClaim {setting.storage.claim}, which all nodes can write to")
    for secret, key in dict.fromkeys(setting.program.secret_env.values()):
        found.append(f"Secret {secret} with the key {key}")
    if asked.options.runtime:
        found.append(
            f"ClusterTrainingRuntime {asked.options.runtime}, with a Job and a container called node"
        )
    return found


def _notes(asked: Asked, setting: Setting, end: str) -> list[str]:
    found = [f"to end all of it: `{end}`"]
    if asked.options.flavor == "job" and setting.roles.has_peers:
        found.append("needs Kubernetes 1.31 or newer, for a job that is done with its chief")
    if setting.program.has_gpus:
        found.append(lint.GPU_IMAGE)
    if setting.storage.size:
        found.append("`kubectl delete --filename` would delete the volume and all checkpoints as well")
    if setting.storage.size and resources.claim(setting)[0]["spec"]["accessModes"] == ["ReadWriteMany"]:
        found.append(
            "the volume must be one that several nodes can write to, such as NFS or Filestore; "
            "ordinary disks cannot: see --storage_class"
        )
    return found


def _commands(asked: Asked, setting: Setting) -> list[str]:
    place = [f"--namespace={setting.namespace}"] if setting.namespace else []
    chief = {
        "job": f"{LABEL}component=training,batch.kubernetes.io/job-completion-index=0",
        "tfjob": "training.kubeflow.org/replica-type=chief",
        "trainjob": f"{LABEL}component=training,batch.kubernetes.io/job-completion-index=0",
    }[asked.options.flavor]
    mine = f"{LABEL}instance={setting.name}"
    if asked.options.flavor == "job" and not (setting.roles.workers > 1 or setting.roles.evaluator):
        chief = f"{LABEL}component=training"
    if setting.runtime:
        mine = f"{JOBSET}={setting.name}"
        chief = "jobset.sigs.k8s.io/replicatedjob-name=node,batch.kubernetes.io/job-completion-index=0"
    commands = [
        f"{shlex.join(['kubectl', 'apply', *place])} --filename={{file}}",
        shlex.join(["kubectl", "get", "pods", *place, f"--selector={mine}", "--watch"]),
        shlex.join(["kubectl", "logs", *place, f"--selector={mine},{chief}", "--follow"]),
    ]
    if setting.logdir:
        port = resources.TENSORBOARD_PORT
        service = f"service/{setting.name}-tensorboard"
        commands.append(shlex.join(["kubectl", "port-forward", *place, service, f"{port}:{port}"]))
    return commands
