"""Elastic jobs on Kubernetes: a launcher in the pod with index 0, and sshd in the other pods.

The launcher lists the pods of the headless Service every second. A pod that Kubernetes has replaced has
another address, so it is a new host.
"""

import shlex
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from ctl.deploy.args import CommandLine
from ctl.deploy.manifest import Document, fill_documents, fill_text
from ctl.errors import EXIT_PREEMPTED, EXIT_RETRY, EXIT_USAGE, UsageError
from ctl.setting_values import parse_worker_range

SCRIPT = "/etc/ctl-elastic/start.sh"
KEY = "ssh-privatekey"  # in the Secret
_RESOLVE_SECS = 300  # until the name server has an address of the Service
_LAUNCHER_SECS = 10  # after the workers have saved, for the launcher to exit


def check_elastic_job(line: CommandLine) -> None:
    """Sets --workers to MAX. Raises UsageError for options that an elastic job does not support."""
    options = line.options
    if parse_worker_range("--elastic", options.elastic).maximum < 2:
        raise UsageError(f"--elastic={options.elastic} allows one pod; expected MIN:MAX with MAX >= 2")
    reasons = {
        "workers": (options.workers > 1, "MAX is the number of pods"),
        "flavor": (options.flavor != "job", "Kubeflow ends all pods if one is lost"),
        "gpus": (options.gpus, "elastic training uses CPUs"),
        "evaluator": (options.evaluator, "the workers of an elastic job evaluate"),
    }
    for name, (is_set, reason) in reasons.items():
        if is_set:
            raise UsageError(
                f"--{name} cannot be combined with --elastic={options.elastic}: {reason}. Omit one of them"
            )
    if not line.command:
        raise UsageError(
            "no program was given after `--`; expected one for --elastic, because the launcher starts it "
            "instead of the ENTRYPOINT of the image: -- python -m trainer.task --model_dir=/shared/flowers"
        )
    options.workers = parse_worker_range("--elastic", options.elastic).maximum


def build_config_map(values: Mapping[str, Any], options: Namespace) -> list[Document]:
    """Returns a ConfigMap with the script of the pods.

    Args:
      values: Values of all templates.
      options: Options of the command line.
    """
    script_values = {
        **values,
        "exit_preempted": EXIT_PREEMPTED,
        "exit_retry": EXIT_RETRY,
        "exit_usage": EXIT_USAGE,
        "resolve_secs": _RESOLVE_SECS,
        "worker_grace_secs": max(1, options.grace_secs - _LAUNCHER_SECS),
    }
    script = fill_text("kubernetes_elastic.sh", script_values)
    return fill_documents("kubernetes_config_map.yaml", {**values, "script": script})


def secret_name(job_name: str) -> str:
    """Returns the name of the Secret with the key of ssh."""
    return f"{job_name}-ssh"


def key_commands(job_name: str, namespace: list[str]) -> list[str]:
    """Returns the commands that create the Secret, and a key for it in the current directory."""
    name = secret_name(job_name)
    create = ["kubectl", "create", "secret", "generic", name, *namespace, "--type=kubernetes.io/ssh-auth"]
    return [
        f"ssh-keygen -q -t ed25519 -N '' -f {name}.key",
        shlex.join([*create, f"--from-file={KEY}={name}.key"]),
        f"rm {name}.key {name}.key.pub",
    ]
