"""The `ctl deploy kubernetes` command: writes one file for `kubectl apply`."""

import shlex

from ctl.deploy import checks, manifest, output, validators
from ctl.deploy.args import CommandLine
from ctl.deploy.kubernetes import elastic, objects
from ctl.deploy.kubernetes import job as kubernetes_job
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
    kubernetes_objects = objects.build_objects(job)
    advice = Advice(
        fill_in=_fill_in(job),
        warnings=kubernetes_job.job_warnings(job),
        notes=_notes(job, kubernetes_objects),
        commands=_commands(job),
    )
    if options.format == "json":  # JSON has no comments
        for document in kubernetes_objects:
            if document["kind"] in _JOBS and document["metadata"]["name"] == job.name:
                document["metadata"]["annotations"] = {LINE: line.as_text()}
        text = manifest.as_json({"apiVersion": "v1", "kind": "List", "items": kubernetes_objects})
    else:
        text = manifest.as_yaml(kubernetes_objects, manifest.file_header(line.as_text(), advice.fill_in))
    output.deliver_manifest(line, text, advice, f"job.{options.format}")


def _fill_in(job: KubernetesJob) -> list[str]:
    options = job.options
    items = validators.find_placeholders([options.image, *job.line.args])
    if options.claim:
        items.append(f"PersistentVolumeClaim {job.claim}, writable by all nodes")
    for secret_reference in dict.fromkeys(job.secrets.values()):
        items.append("Secret {} with the key {}".format(*secret_reference.split(":")))
    if options.elastic:
        items.append(f"Secret {elastic.secret_name(job.name)} with a key of ssh, by the commands below")
        items.append(f"{options.image}, built with `ctl deploy docker --ssh`")
    if options.runtime:
        items.append(f"ClusterTrainingRuntime {options.runtime}, with a job and a container named node")
    return items


def _notes(job: KubernetesJob, kubernetes_objects: list[Document]) -> list[str]:
    options = job.options
    kinds = dict.fromkeys(
        d["kind"].lower() for d in kubernetes_objects if d["kind"] != "PersistentVolumeClaim"
    )
    delete = [
        "kubectl",
        "delete",
        ",".join(kinds),
        *_namespace(job),
        f"--selector={LABEL}instance={job.name}",
    ]
    notes = [f"to delete all objects: `{shlex.join(delete)}`"]
    if options.flavor == "job" and job.has_peers:
        notes.append("requires Kubernetes 1.31 or newer, because the job completes with its chief")
    if options.gpus:
        notes.append(checks.GPU_IMAGE)
    if options.storage:
        notes.append("`kubectl delete --filename` would delete the volume with all checkpoints")
    if options.storage and job.shares_checkpoints:
        notes.append("the volume must be writable by several nodes, such as NFS: see --storage_class")
    return notes


def _namespace(job: KubernetesJob) -> list[str]:
    return [f"--namespace={job.options.namespace}"] if job.options.namespace else []


def _commands(job: KubernetesJob) -> list[str]:
    namespace, options = _namespace(job), job.options
    job_selector, first_index = f"{LABEL}instance={job.name}", "batch.kubernetes.io/job-completion-index=0"
    chief_selector = f"{LABEL}component=training,{first_index}"
    if options.flavor == "tfjob":
        chief_selector = "training.kubeflow.org/replica-type=chief"
    elif options.flavor == "job" and not job.is_indexed:
        chief_selector = f"{LABEL}component=training"
    elif options.runtime:
        job_selector, chief_selector = (
            f"{JOBSET}={job.name}",
            f"jobset.sigs.k8s.io/replicatedjob-name=node,{first_index}",
        )
    apply = shlex.join(["kubectl", "apply", *namespace])
    commands = [
        *(elastic.key_commands(job.name, namespace) if options.elastic else []),
        f"{apply} --dry-run=server --filename={{file}}",
        f"{apply} --filename={{file}}",
        shlex.join(["kubectl", "get", "pods", *namespace, f"--selector={job_selector}", "--watch"]),
        shlex.join(
            ["kubectl", "logs", *namespace, f"--selector={job_selector},{chief_selector}", "--follow"]
        ),
    ]
    if job.logdir:
        port = objects.TENSORBOARD_PORT
        service = f"service/{job.name}-tensorboard"
        commands.append(shlex.join(["kubectl", "port-forward", *namespace, service, f"{port}:{port}"]))
    return commands
