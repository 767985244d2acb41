"""The job itself: a Job of Kubernetes, a TFJob or a TrainJob of Kubeflow.

A worker that loses a peer ends with 134, so one lost pod ends all of them, and each is counted: N pods
use up N of the backoff limit in one restart of the gang.
"""

from typing import Any

from ctl.deploy.kubernetes import pods, resources
from ctl.deploy.kubernetes.setting import PORT, Setting

Document = dict[str, Any]


def job(setting: Setting) -> list[Document]:
    """A Job: indexed, with a headless service, where several pods are to find each other."""
    roles = setting.roles
    is_indexed = roles.workers > 1 or roles.evaluator
    hosts = setting.hosts(setting.name)
    told = {"CTL_WORKERS": ",".join(hosts)} if is_indexed else {}
    if roles.evaluator:
        told["CTL_EVALUATOR"] = "1"
    ports = [{"name": "training", "containerPort": PORT}] if is_indexed else []
    container = pods.training_container(setting, "tensorflow", told, ports=ports)
    subdomain = {"subdomain": setting.name} if is_indexed else {}
    template = {
        "metadata": {"labels": setting.labels("training")},
        "spec": pods.pod(setting, container, gpus=True, restartPolicy="Never", **subdomain),
    }
    spec = {
        **(_indexed(setting) if is_indexed else {"backoffLimit": setting.care.max_restarts}),
        **resources.deadline(setting),
        "podFailurePolicy": pods.failure_policy("tensorflow"),
        "template": template,
    }
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": setting.metadata(), "spec": spec}
    service = [resources.headless_service(setting)] if is_indexed else []
    return [*service, made, *resources.evaluator(setting, hosts)]


def _indexed(setting: Setting) -> dict[str, Any]:
    """Done with the chief; each index may fail `max_restarts` times, and waits for itself alone."""
    count, restarts = setting.roles.workers, setting.care.max_restarts
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": count * restarts,
        "backoffLimitPerIndex": restarts,
        "maxFailedIndexes": 0,
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
    }


def tfjob(setting: Setting) -> list[Document]:
    """A TFJob of Kubeflow's training operator v1, which writes TF_CONFIG."""
    roles, care = setting.roles, setting.care
    counts = {"Chief": 1, "Worker": roles.workers - 1, "PS": roles.ps, "Evaluator": int(roles.evaluator)}
    replicas = {kind: _replica(setting, kind, n) for kind, n in counts.items() if n}
    policy = {
        "cleanPodPolicy": "Running",  # what still runs when the chief is done, such as an evaluator
        "backoffLimit": care.max_restarts * sum(counts.values()),
        **resources.deadline(setting),
    }
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "TFJob",
            "metadata": setting.metadata(),
            "spec": {"runPolicy": policy, "tfReplicaSpecs": replicas},
        }
    ]


def _replica(setting: Setting, kind: str, count: int) -> dict[str, Any]:
    # the operator looks for a container and a port of these names
    ports = [{"name": "tfjob-port", "containerPort": PORT}]
    gpus = kind in ("Chief", "Worker")
    container = pods.training_container(setting, "tensorflow", {}, ports=ports, gpus=gpus)
    component = "evaluator" if kind == "Evaluator" else "training"
    return {
        "replicas": count,
        "restartPolicy": "ExitCode",  # from 128 on again, below never
        "template": {
            "metadata": {
                "annotations": {"sidecar.istio.io/inject": "false"},
                "labels": setting.labels(component),
            },
            "spec": pods.pod(setting, container, gpus=gpus),
        },
    }


def trainjob(setting: Setting) -> list[Document]:
    """A TrainJob of Kubeflow Trainer v2, and a TrainingRuntime unless one is named.

    Trainer knows nothing of TF_CONFIG; the pods are named after its JobSet, `NAME-node-0-INDEX`.
    """
    program, count, runtime = setting.program, setting.roles.workers, setting.runtime
    hosts = setting.hosts(f"{setting.name}-node-0")
    told = {"CTL_WORKERS": ",".join(hosts)} if count > 1 or setting.roles.evaluator else {}
    if setting.roles.evaluator:
        told["CTL_EVALUATOR"] = "1"
    trainer: dict[str, Any] = {"image": program.image, "numNodes": count}
    if program.command:
        trainer["command"] = pods.plain(program.command)
    if program.args:
        trainer["args"] = pods.plain(program.args)
    env = pods.environment(setting, told)
    if env:
        trainer["env"] = env
    trainer["resourcesPerNode"] = program.needs(gpus=True)
    kind = "ClusterTrainingRuntime" if runtime else "TrainingRuntime"
    made = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": setting.metadata(),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": kind,
                "name": runtime or setting.name,
            },
            **resources.deadline(setting),
            "trainer": trainer,
        },
    }
    return [*([] if runtime else [_runtime(setting)]), made, *resources.evaluator(setting, hosts)]


def _runtime(setting: Setting) -> Document:
    """A runtime without a machine-learning plugin: a JobSet of one Job, whose pods are as elsewhere."""
    container = {
        "name": "node",
        "image": setting.program.image,
        "securityContext": pods.confined(),
        "volumeMounts": pods.mounts(setting),
    }
    job = {
        "backoffLimit": setting.roles.workers * setting.care.max_restarts,
        "podFailurePolicy": pods.failure_policy("node"),
        "template": {
            "metadata": {"labels": setting.labels("training")},
            "spec": pods.pod(setting, container, gpus=True, restartPolicy="Never"),
        },
    }
    ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    node = {"name": "node", "template": {"metadata": {"labels": ancestor}, "spec": job}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": setting.metadata(),
        "spec": {
            "mlPolicy": {"numNodes": setting.roles.workers},
            "template": {"spec": {"replicatedJobs": [node]}},
        },
    }
