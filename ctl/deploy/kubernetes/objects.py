"""Kubernetes objects of a job, from the templates: volume, network policies, job, TensorBoard.

A worker that loses a peer ends with 134, so the loss of one pod ends all pods, and each one is counted. One
restart of a job with N pods uses N of the backoff limit.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ctl.deploy.kubernetes import elastic
from ctl.deploy.kubernetes.job import KubernetesJob
from ctl.deploy.manifest import Document, fill_document, fill_documents
from ctl.deploy.validators import parse_assignments
from ctl.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE

SERVICE_PORT = 2222
TENSORBOARD_PORT = 6006
LABEL = "app.kubernetes.io/"
JOBSET = "jobset.sigs.k8s.io/jobset-name"


def build_objects(job: KubernetesJob) -> list[Document]:
    """Returns all objects in the order of creation: storage, network policies, job, TensorBoard."""
    jobs = {"job": _job, "tfjob": _tfjob, "trainjob": _trainjob}[job.options.flavor](job)
    config_map = elastic.build_config_map(_values(job), job.options) if job.options.elastic else []
    return [*_volume(job), *_policies(job), *config_map, *jobs, *_tensorboard(job)]


def _values(job: KubernetesJob) -> dict[str, Any]:
    """Returns the values that several templates share."""
    options = job.options
    return {
        **vars(options),
        "name": job.name,
        "container": "tensorflow",
        "indexed": False,
        "command": _escape_arguments(job.line.command) or None,
        "args": _escape_arguments(job.line.args) or None,
        "gpus": str(options.gpus) if options.gpus else None,
        "claim": job.claim or None,
        "timeout_secs": options.timeout,
        "backoff_limit": options.workers * options.max_restarts,
        "exit_preempted": EXIT_PREEMPTED,
        "exit_failed": EXIT_FAILED,
        "exit_usage": EXIT_USAGE,
    }


def _escape_arguments(arguments: Iterable[str]) -> list[str]:
    """Escapes arguments for Kubernetes, which replaces `$(NAME)`, and `$$` by `$`."""
    return [
        argument.replace("$", "$$") if "$$" in argument or "$(" in argument else argument
        for argument in arguments
    ]


def _environment(job: KubernetesJob, own_variables: Mapping[str, str]) -> list[Document] | None:
    """Returns the environment: `own_variables`, the variables of --env, and references to Secrets."""
    variables = {**own_variables, **job.env}
    env: list[Document] = [
        {"name": name, "value": value}
        for name, value in zip(variables, _escape_arguments(variables.values()), strict=True)
    ]
    for name, secret_reference in job.secrets.items():
        secret, _, key = secret_reference.partition(":")
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return env or None


def _pod(job: KubernetesJob, component: str, overrides: Mapping[str, Any]) -> Document:
    """Returns a pod template.

    Nodes with GPUs reject pods that do not tolerate their taint, and `--node_selector` selects such nodes
    if there are GPUs. Both settings apply only to pods with GPUs.

    Args:
      job: The job.
      component: Value of the component label.
      overrides: Values that differ from those of a training pod.
    """
    selector = parse_assignments("--node_selector", job.options.node_selector)
    values = {
        **_values(job),
        "component": component,
        "env": _environment(job, {}),
        "writes": True,
        "resources": True,
        **dict.fromkeys(("restart_policy", "istio_inject", "subdomain", "port_name", "port", "read_only")),
        **overrides,
    }
    is_placed = bool(values["gpus"]) == bool(job.options.gpus)
    values["node_selector"] = selector if selector and is_placed else None
    return fill_document("kubernetes_pod.yaml", values)


def _addresses(job: KubernetesJob, pod: str) -> list[str]:
    """Returns host:port of all training pods by index. `pod` is the prefix of their names."""
    domain = f".{job.options.namespace}.svc" if job.options.namespace else ""
    return [f"{pod}-{i}.{job.name}{domain}:{SERVICE_PORT}" for i in range(job.options.workers)]


def _cluster_variables(job: KubernetesJob, addresses: list[str]) -> dict[str, str]:
    """Returns the variables that define ctl's cluster. A single worker needs none."""
    has_fixed_peers = job.is_indexed and not job.options.elastic
    variables = {"CTL_WORKERS": ",".join(addresses)} if has_fixed_peers else {}
    return variables | ({"CTL_EVALUATOR": "1"} if job.options.evaluator else {})


def _job(job: KubernetesJob) -> list[Document]:
    """Returns a Job. With several pods it is indexed and has a headless Service for the pod names."""
    addresses = _addresses(job, job.name)
    env = _environment(job, _cluster_variables(job, addresses))
    pod: dict[str, Any] = {"restart_policy": "Never", "env": env}
    if job.is_indexed:
        pod |= {"subdomain": job.name, "port_name": "training", "port": SERVICE_PORT}
    if job.options.elastic:
        pod |= {"command": ["sh", elastic.SCRIPT], "args": _escape_arguments(job.line.program)}
    job_values = {"indexed": job.is_indexed, "job_name": job.name, "pod": _pod(job, "training", pod)}
    return [*fill_documents("kubernetes_job.yaml", _values(job) | job_values), *_evaluator(job, addresses)]


def _evaluator(job: KubernetesJob, addresses: list[str]) -> list[Document]:
    """Returns a Job of one pod that evaluates checkpoints. It ends after the training has ended."""
    if not job.options.evaluator:
        return []
    config = {"cluster": {"worker": addresses}, "task": {"type": "evaluator", "index": 0}}
    env = _environment(job, {"TF_CONFIG": json.dumps(config)})
    pod = _pod(job, "evaluator", {"restart_policy": "Never", "env": env, "gpus": None})
    job_values = {
        "job_name": f"{job.name}-evaluator",
        "backoff_limit": job.options.max_restarts,
        "pod": pod,
    }
    return fill_documents("kubernetes_job.yaml", _values(job) | job_values)


def _tfjob(job: KubernetesJob) -> list[Document]:
    """Returns a TFJob of Kubeflow's training operator v1, which sets TF_CONFIG."""
    options = job.options
    pod_values = {"istio_inject": "false", "port_name": "tfjob-port", "port": SERVICE_PORT}
    count = options.workers + options.ps + options.evaluator
    values = {
        **_values(job),
        "backoff_limit": options.max_restarts * count,
        "other_workers": options.workers - 1,
        "training_pod": _pod(job, "training", pod_values),
        "ps_pod": _pod(job, "training", {**pod_values, "gpus": None}),
        "evaluator_pod": _pod(job, "evaluator", {**pod_values, "gpus": None}),
    }
    return fill_documents("kubeflow_tfjob.yaml", values)


def _trainjob(job: KubernetesJob) -> list[Document]:
    """Returns a TrainJob of Kubeflow Trainer v2, and a TrainingRuntime unless an existing one is used."""
    runtime = job.options.runtime
    addresses = _addresses(job, f"{job.name}-node-0")
    omitted = dict.fromkeys(("command", "args", "env", "resources"))
    pod = _pod(job, "training", {"restart_policy": "Never", "container": "node", **omitted})
    node = {"job_name": "node", "container": "node", "timeout_secs": None, "pod": pod}
    values = {
        **_values(job),
        "new_runtime": not runtime,
        "job_spec": fill_document("kubernetes_job.yaml", {**_values(job), **node})["spec"],
        "runtime_kind": "ClusterTrainingRuntime" if runtime else "TrainingRuntime",
        "runtime": runtime or job.name,
        "env": _environment(job, _cluster_variables(job, addresses)),
    }
    return [*fill_documents("kubeflow_trainjob.yaml", values), *_evaluator(job, addresses)]


def _volume(job: KubernetesJob) -> list[Document]:
    """Returns the PersistentVolumeClaim if a new volume is requested. Several pods need ReadWriteMany."""
    if not job.options.storage:
        return []
    access_mode = "ReadWriteMany" if job.shares_checkpoints else "ReadWriteOnce"
    values = {**_values(job), "size": job.options.storage, "access_mode": access_mode}
    return fill_documents("kubernetes_volume.yaml", values)


def _policies(job: KubernetesJob) -> list[Document]:
    """Returns NetworkPolicies that allow connections between training pods only."""
    options = job.options
    has_own_policy = job.has_peers or bool(options.runtime)
    components = {"training": not has_own_policy, "evaluator": options.evaluator, "tensorboard": job.logdir}
    labels = {f"{LABEL}name": "ctl", f"{LABEL}instance": job.name, f"{LABEL}component": "training"}
    values = {
        **_values(job),
        "training_policy": has_own_policy,
        "training_labels": {JOBSET: job.name} if options.runtime else labels,
        "peers": job.has_peers,
        "few_ports": not (options.gpus or options.elastic),
        "closed": [name for name, is_closed in components.items() if is_closed],
    }
    return fill_documents("kubernetes_network_policy.yaml", values)


def _tensorboard(job: KubernetesJob) -> list[Document]:
    """Returns a Deployment and a Service, which is reachable only inside the cluster."""
    if not job.logdir:
        return []
    args = [f"--logdir={job.logdir}", "--host=0.0.0.0", f"--port={TENSORBOARD_PORT}"]
    pod_values = {
        "container": "tensorboard",
        "command": ["tensorboard"],
        "args": _escape_arguments(args),
        "env": None,
        "port_name": "http",
        "port": TENSORBOARD_PORT,
        "cpu": "250m",
        "memory": "1Gi",
        "gpus": None,
        "elastic": None,
        "writes": False,
        "read_only": True,
    }
    pod = _pod(job, "tensorboard", pod_values)
    return fill_documents("kubernetes_tensorboard.yaml", {**_values(job), "pod": pod})
