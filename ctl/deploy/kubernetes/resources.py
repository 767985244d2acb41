"""What stands around a job: its service, who may reach it, storage, the evaluator, TensorBoard."""

import json
from typing import Any

from ctl.deploy.kubernetes import pods
from ctl.deploy.kubernetes.setting import LABEL, PORT, Setting

Document = dict[str, Any]
TENSORBOARD_PORT = 6006
_TENSORBOARD_RESOURCES = {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}


def headless_service(setting: Setting) -> Document:
    """Gives each training pod a name of its own, also before it is ready: they meet while they start."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": setting.metadata(),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": setting.labels("training"),
            "ports": [{"name": "training", "port": PORT, "targetPort": PORT}],
        },
    }


def claim(setting: Setting) -> list[Document]:
    """The PersistentVolumeClaim, if one is to be made; for many nodes if there are several pods."""
    storage = setting.storage
    if not storage.size:
        return []
    pods_in_all = setting.roles.workers + setting.roles.ps + setting.roles.evaluator
    mode = "ReadWriteMany" if pods_in_all > 1 or setting.logdir else "ReadWriteOnce"
    kind = {"storageClassName": storage.storage_class} if storage.storage_class else {}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": setting.metadata("-shared"),
            "spec": {"accessModes": [mode], **kind, "resources": {"requests": {"storage": storage.size}}},
        }
    ]


def policies(setting: Setting) -> list[Document]:
    """NetworkPolicies: the training pods reach each other, nobody else reaches any pod.

    TensorFlow's server asks for no password. With GPUs NCCL takes ports of its own, so peers may use all.
    """
    closed = ["evaluator"] if setting.roles.evaluator else []
    closed += ["tensorboard"] if setting.logdir else []
    made = []
    peers = {"podSelector": {"matchLabels": setting.training_pods()}}
    training = peers["podSelector"] if setting.runtime else _of(setting, ["training"])
    if setting.roles.has_peers:
        one = {"ports": [{"protocol": "TCP", "port": PORT}]}
        ports = {} if setting.program.has_gpus else one
        made.append(_policy(setting, "", training, [{"from": [peers], **ports}]))
    elif setting.runtime:
        made.append(_policy(setting, "", training, []))
    else:
        closed.insert(0, "training")
    return [*made, *([_policy(setting, "-closed", _of(setting, closed), [])] if closed else [])]


def _of(setting: Setting, components: list[str]) -> Document:
    which = {"key": f"{LABEL}component", "operator": "In", "values": components}
    return {"matchLabels": setting.labels(), "matchExpressions": [which]}


def _policy(setting: Setting, suffix: str, chosen: Document, ingress: list) -> Document:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": setting.metadata(suffix),
        "spec": {"podSelector": chosen, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def evaluator(setting: Setting, hosts: list[str]) -> list[Document]:
    """A Job of one pod that evaluates checkpoints; it ends by itself when the training has."""
    if not setting.roles.evaluator:
        return []
    config = {"cluster": {"worker": hosts}, "task": {"type": "evaluator", "index": 0}}
    told = {"TF_CONFIG": json.dumps(config)}
    container = pods.training_container(setting, "tensorflow", told, gpus=False)
    labels = setting.labels("evaluator")
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": setting.metadata("-evaluator"),
            "spec": {
                "backoffLimit": setting.care.max_restarts,
                **deadline(setting),
                "podFailurePolicy": pods.failure_policy("tensorflow"),
                "template": {
                    "metadata": {"labels": labels},
                    "spec": pods.pod(setting, container, restartPolicy="Never"),
                },
            },
        }
    ]


def deadline(setting: Setting) -> dict[str, int]:
    """The field that ends a job after a while, or nothing."""
    secs = setting.care.timeout_secs
    return {"activeDeadlineSeconds": secs} if secs else {}


def tensorboard(setting: Setting) -> list[Document]:
    """A Deployment and a Service inside the cluster; never one that is reachable from outside."""
    if not setting.logdir:
        return []
    labels = setting.labels("tensorboard")
    container: dict[str, Any] = {
        "name": "tensorboard",
        "image": setting.program.image,
        "command": ["tensorboard"],
        "args": pods.plain([f"--logdir={setting.logdir}", "--host=0.0.0.0", f"--port={TENSORBOARD_PORT}"]),
        "ports": [{"name": "http", "containerPort": TENSORBOARD_PORT}],
        "resources": _TENSORBOARD_RESOURCES,
        "securityContext": pods.confined(),
    }
    if setting.storage.claim:
        container["volumeMounts"] = pods.mounts(setting, read_only=True)
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": setting.metadata("-tensorboard"),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pods.pod(setting, container)},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": setting.metadata("-tensorboard"),
        "spec": {
            "type": "ClusterIP",
            "selector": labels,
            "ports": [{"name": "http", "port": TENSORBOARD_PORT, "targetPort": "http"}],
        },
    }
    return [deployment, service]
