"""Pods: one container without privileges, as user 1000, on a volume that all see."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctl.deploy.kubernetes.setting import GPU, Setting
from ctl.errors import EXIT_FAILED, EXIT_PREEMPTED, EXIT_USAGE

_USER = 1000  # that of `ctl deploy docker`
_GPU_NODES = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}


def pod(setting: Setting, container: dict[str, Any], *, gpus: bool = False, **more: Any) -> dict[str, Any]:
    """A PodSpec around one container; `more` are fields of its own.

    Nodes with GPUs turn away who does not tolerate them, and `--node_selector` names such nodes when
    there are GPUs: so both are for the pods with GPUs alone.
    """
    care, made = setting.care, dict(more)
    if care.service_account:
        made["serviceAccountName"] = care.service_account
    has_gpus = gpus and setting.program.has_gpus
    if care.node_selector and has_gpus == setting.program.has_gpus:
        made["nodeSelector"] = dict(care.node_selector)
    if has_gpus:
        made["tolerations"] = [dict(_GPU_NODES)]
    return {
        **made,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": care.grace_secs,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": _volumes(setting),
    }


def training_container(
    setting: Setting, name: str, told: Mapping[str, str], *, ports: Sequence[dict] = (), gpus: bool = True
) -> dict[str, Any]:
    """The container of a process that trains or evaluates; `told`: what ctl tells it."""
    program = setting.program
    made: dict[str, Any] = {"name": name, "image": program.image}
    if program.command:
        made["command"] = plain(program.command)
    if program.args:
        made["args"] = plain(program.args)
    env = environment(setting, told)
    if env:
        made["env"] = env
    if ports:
        made["ports"] = list(ports)
    return {
        **made,
        "resources": program.needs(gpus=gpus),
        "securityContext": confined(),
        "volumeMounts": mounts(setting),
    }


def environment(setting: Setting, told: Mapping[str, str]) -> list[dict[str, Any]]:
    """Variables: what ctl tells, then those asked for, then those that Secrets hold."""
    shown = {**told, **setting.program.env}
    hidden = setting.program.secret_env.items()
    return [
        *({"name": n, "value": v} for n, v in zip(shown, plain(shown.values()), strict=True)),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for name, (secret, key) in hidden
        ),
    ]


def plain(words: Iterable[str]) -> list[str]:
    """Words of a command, its args or the values of variables, so that they arrive as they are.

    Kubernetes puts a variable's value for `$(NAME)` and `$` for `$$`.
    """
    return [w.replace("$", "$$") if "$$" in w or "$(" in w else w for w in words]


def confined() -> dict[str, Any]:
    """The SecurityContext of every container."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def mounts(setting: Setting, *, read_only: bool = False) -> list[dict[str, Any]]:
    """The VolumeMounts of every container."""
    shared = {"name": "shared", "mountPath": setting.storage.mount}
    if read_only:
        return [{**shared, "readOnly": True}] if setting.storage.claim else []
    return [{"name": "shm", "mountPath": "/dev/shm"}, *([shared] if setting.storage.claim else [])]


def failure_policy(container: str) -> dict[str, Any]:
    """Which ends count: not those of a node that goes away; exit codes that no restart helps end the job.

    When a node is drained its pod saves together with the others, and all end with EXIT_PREEMPTED: on
    other nodes without a condition that says why.
    """

    def ended_with(*codes: int) -> dict[str, Any]:
        return {"containerName": container, "operator": "In", "values": list(codes)}

    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": ended_with(EXIT_PREEMPTED)},
            {"action": "FailJob", "onExitCodes": ended_with(EXIT_FAILED, EXIT_USAGE)},
        ]
    }


def _volumes(setting: Setting) -> list[dict[str, Any]]:
    storage = setting.storage
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": storage.shm}}
    claim = {"name": "shared", "persistentVolumeClaim": {"claimName": storage.claim}}
    return [shm, *([claim] if storage.claim else [])]
