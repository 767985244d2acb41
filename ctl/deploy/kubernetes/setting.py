"""What a job on Kubernetes consists of, whatever kind of object carries it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PORT = 2222
LABEL = "app.kubernetes.io/"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
GPU = "nvidia.com/gpu"  # as a resource and as the taint of nodes that have some


@dataclass(frozen=True)
class Program:
    """What runs in a container.

    Attributes:
      image: with a tag or a digest.
      command: empty for the image's own.
      args: its flags.
      env: variables by name.
      secret_env: variables by name, each (Secret, key).
      resources: requests and limits, as Kubernetes writes them.
    """

    image: str
    command: Sequence[str]
    args: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def has_gpus(self) -> bool:
        """Whether the pods that train have GPUs."""
        return GPU in self.resources.get("limits", {})

    def needs(self, *, gpus: bool) -> dict[str, dict[str, str]]:
        """The resources of a pod, with the GPUs of those that train or without."""
        return {
            kind: {name: n for name, n in of.items() if gpus or name != GPU}
            for kind, of in self.resources.items()
        }


@dataclass(frozen=True)
class Storage:
    """A volume that all pods see, and memory for /dev/shm.

    Attributes:
      claim: a PersistentVolumeClaim, or "" for none.
      size: of a claim to be made, or "" for one that is there.
      storage_class: of the claim to be made, or "" for the cluster's default.
      mount: where it is in the containers.
      shm: size of /dev/shm.
    """

    claim: str
    size: str
    storage_class: str
    mount: str
    shm: str


@dataclass(frozen=True)
class Roles:
    """How many of each; `workers` counts the chief."""

    workers: int
    ps: int = 0
    evaluator: bool = False

    @property
    def has_peers(self) -> bool:
        """Whether processes talk to each other."""
        return self.workers + self.ps > 1


@dataclass(frozen=True)
class Care:
    """How pods are placed, ended and started again.

    Attributes:
      max_restarts: how often all may be started again.
      grace_secs: seconds from SIGTERM to SIGKILL.
      timeout_secs: seconds after which the job is ended, or None.
      service_account: of the pods, or "" for the namespace's default.
      node_selector: labels of the nodes to run on; with GPUs, of the pods that have some.
    """

    max_restarts: int
    grace_secs: int
    timeout_secs: int | None
    service_account: str
    node_selector: Mapping[str, str]


@dataclass(frozen=True)
class Setting:
    """One job.

    Attributes:
      name: of the job, and the beginning of all other names.
      namespace: or "" for that of whoever applies the file.
      logdir: what TensorBoard shows, or "" without one.
      runtime: a ClusterTrainingRuntime that is there and says what the pods are like, or "".
    """

    name: str
    namespace: str
    roles: Roles
    program: Program
    storage: Storage
    care: Care
    logdir: str
    runtime: str = ""

    def metadata(self, suffix: str = "", **more: object) -> dict:
        """Name, namespace and labels of an object."""
        place = {"namespace": self.namespace} if self.namespace else {}
        return {"name": self.name + suffix, **place, "labels": self.labels(), **more}

    def labels(self, component: str = "") -> dict[str, str]:
        """What the objects of this job have in common; of one component's pods, what tells them apart."""
        part = {f"{LABEL}component": component} if component else {}
        return {f"{LABEL}name": "ctl", f"{LABEL}instance": self.name, **part}

    def training_pods(self) -> dict[str, str]:
        """Labels of the pods that train; those of a runtime that is there have only their JobSet's."""
        return {JOBSET: self.name} if self.runtime else self.labels("training")

    def hosts(self, pod: str) -> list[str]:
        """host:port of all training pods in order; `pod` is their name before the index."""
        domain = f".{self.namespace}.svc" if self.namespace else ""
        return [f"{pod}-{i}.{self.name}{domain}:{PORT}" for i in range(self.roles.workers)]
