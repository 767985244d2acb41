"""The `ctl deploy kubernetes` command: writes one file for `kubectl apply`."""

import shlex

from ctl.deploy import checks, manifest, output, validators
from ctl.deploy.args import CommandLine
from ctl.deploy.kubernetes import job as kubernetes_job
from ctl.deploy.kubernetes import objects
from ctl.deploy.kubernetes import options as kubernetes_options
from ctl.deploy.kubernetes.job import KubernetesJob
from ctl.deploy.kubernetes.objects import JOBSET, LABEL
from ctl.deploy.manifest import Document
from ctl.deploy.output import Advice

parser = kubernetes_options.parser
LINE = "ctl/command-line"  # name of an annotation
_JOBS = ("Job", "TFJob", "TrainJob")


def write(line: CommandLine) -> None:
    """Writes the manifest."""
    options, job = line.options, kubernetes_job.read_job(line)
    made = objects.objects_of(job)
    advice = Advice(
        fill_in=_fill_in(job),
        warnings=kubernetes_job.job_warnings(job),
        notes=_notes(job, made),
        commands=_commands(job),
    )
    if options.format == "json":  # JSON has no comments
        for document in made:
            if document["kind"] in _JOBS and document["metadata"]["name"] == job.name:
                document["metadata"]["annotations"] = {LINE: line.as_text()}
        text = manifest.as_json({"apiVersion": "v1", "kind": "List", "items": made})
    else:
        text = manifest.as_yaml(made, manifest.file_header(line.as_text(), advice.fill_in))
    output.deliver(line, text, advice, f"job.{options.format}")


def _fill_in(job: KubernetesJob) -> list[str]:
    options = job.options
    found = validators.blanks([options.image, *job.line.args])
    if options.claim:
        found.append(f"PersistentVolumeClaim {job.claim}, which all nodes can write to")
    for place in dict.fromkeys(job.secrets.values()):
        found.append("Secret {} with the key {}".format(*place.split(":")))
    if options.runtime:
        found.append(f"ClusterTrainingRuntime {options.runtime}, with a Job and a container called node")
    return found


def _notes(job: KubernetesJob, made: list[Document]) -> list[str]:
    options = job.options
    kinds = dict.fromkeys(d["kind"].lower() for d in made if d["kind"] != "PersistentVolumeClaim")
    delete = [
        "kubectl",
        "delete",
        ",".join(kinds),
        *_namespace(job),
        f"--selector={LABEL}instance={job.name}",
    ]
    found = [f"to end all of it: `{shlex.join(delete)}`"]
    if options.flavor == "job" and job.has_peers:
        found.append("needs Kubernetes 1.31 or newer, for a job that is done with its chief")
    if options.gpus:
        found.append(checks.GPU_IMAGE)
    if options.storage:
        found.append("`kubectl delete --filename` would delete the volume and all checkpoints as well")
    if options.storage and job.shares_checkpoints:
        found.append("several nodes must be able to write to the volume, such as NFS: see --storage_class")
    return found


def _namespace(job: KubernetesJob) -> list[str]:
    return [f"--namespace={job.options.namespace}"] if job.options.namespace else []


def _commands(job: KubernetesJob) -> list[str]:
    place, options = _namespace(job), job.options
    mine, index = f"{LABEL}instance={job.name}", "batch.kubernetes.io/job-completion-index=0"
    chief = f"{LABEL}component=training,{index}"
    if options.flavor == "tfjob":
        chief = "training.kubeflow.org/replica-type=chief"
    elif options.flavor == "job" and not job.is_indexed:
        chief = f"{LABEL}component=training"
    elif options.runtime:
        mine, chief = f"{JOBSET}={job.name}", f"jobset.sigs.k8s.io/replicatedjob-name=node,{index}"
    apply = shlex.join(["kubectl", "apply", *place])
    commands = [
        f"{apply} --dry-run=server --filename={{file}}",
        f"{apply} --filename={{file}}",
        shlex.join(["kubectl", "get", "pods", *place, f"--selector={mine}", "--watch"]),
        shlex.join(["kubectl", "logs", *place, f"--selector={mine},{chief}", "--follow"]),
    ]
    if job.logdir:
        port = objects.TENSORBOARD_PORT
        service = f"service/{job.name}-tensorboard"
        commands.append(shlex.join(["kubectl", "port-forward", *place, service, f"{port}:{port}"]))
    return commands
