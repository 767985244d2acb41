"""A job of Vertex AI as the API has it: CustomJobSpec, and HyperparameterTuningJob around it.

Pools have their meaning by position: the chief, more workers, parameter servers or the Reduction
Server, the evaluator. One that is not used is empty; empty ones at the end are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctl.deploy.vertex.machines import Machine

_REDUCTION_IMAGE = "{area}-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
_AREAS = {"europe": "europe", "asia": "asia"}


@dataclass(frozen=True)
class Container:
    """What runs: an image and the words to run in it; without a command, the image's own."""

    image: str
    command: Sequence[str]
    args: Sequence[str]
    env: Mapping[str, str]

    def spec(self) -> dict[str, Any]:
        """The ContainerSpec of the API."""
        made: dict[str, Any] = {"imageUri": self.image}
        if self.command:
            made["command"] = list(self.command)
        if self.args:
            made["args"] = list(self.args)
        if self.env:
            made["env"] = [{"name": name, "value": value} for name, value in self.env.items()]
        return made


@dataclass(frozen=True)
class Pools:
    """Which machines, and how many.

    Attributes:
      machine: each that trains.
      workers: how many of them, the chief included.
      side: the evaluator's and each parameter server's.
      ps: parameter servers.
      reduction: machine and count of the Reduction Server; count 0 is none.
      evaluator: whether there is one.
      disk_gb: boot disk of each, or None for the service's choice.
    """

    machine: Machine
    workers: int
    side: Machine
    ps: int = 0
    reduction: tuple[Machine, int] = (Machine("n1-highcpu-16"), 0)
    evaluator: bool = False
    disk_gb: int | None = None

    def specs(self, container: Container, region: str) -> list[dict[str, Any]]:
        """The WorkerPoolSpecs of the API."""
        made = [
            self._pool(self.machine, 1, container.spec()),
            self._pool(self.machine, self.workers - 1, container.spec()),
            self._pool(self.side, self.ps, container.spec()),
            self._pool(self.side, int(self.evaluator), container.spec()),
        ]
        machine, count = self.reduction
        if count:
            area = _AREAS.get(region.partition("-")[0], "us")
            made[2] = self._pool(machine, count, {"imageUri": _REDUCTION_IMAGE.format(area=area)})
        while not made[-1]:
            made.pop()
        return made

    def _pool(self, machine: Machine, count: int, container: dict[str, Any]) -> dict[str, Any]:
        if not count:
            return {}
        disk = {"diskSpec": {"bootDiskSizeGb": self.disk_gb}} if self.disk_gb else {}
        return {"machineSpec": machine.spec(), "replicaCount": count, **disk, "containerSpec": container}


@dataclass(frozen=True)
class Surroundings:
    """The rest of a CustomJobSpec; what is empty or None is left out."""

    base_output: str | None = None
    service_account: str | None = None
    network: str | None = None
    tensorboard: str | None = None
    timeout_secs: int | None = None
    spot: bool = False


@dataclass(frozen=True)
class Study:
    """What a tuning job looks for."""

    metric: Mapping[str, str]
    parameters: Sequence[Mapping[str, Any]]
    trials: int
    parallel: int
    labels: Mapping[str, str] = field(default_factory=dict)


def custom_job_spec(pools: Sequence[dict[str, Any]], around: Surroundings, *, gang: bool) -> dict:
    """A CustomJobSpec; `gang`: when a worker starts again, all do."""
    scheduling: dict[str, Any] = {}
    if around.timeout_secs:
        scheduling["timeout"] = f"{around.timeout_secs}s"
    if gang:
        scheduling["restartJobOnWorkerRestart"] = True
    if around.spot:
        scheduling["strategy"] = "SPOT"
    made: dict[str, Any] = {"workerPoolSpecs": list(pools)}
    if scheduling:
        made["scheduling"] = scheduling
    if around.base_output:
        made["baseOutputDirectory"] = {"outputUriPrefix": around.base_output}
    named = {
        "serviceAccount": around.service_account,
        "network": around.network,
        "tensorboard": around.tensorboard,
    }
    return made | {key: value for key, value in named.items() if value}


def tuning_job(name: str, spec: dict, study: Study) -> dict:
    """A HyperparameterTuningJob whose trials are `spec`."""
    made: dict[str, Any] = {
        "displayName": name,
        "studySpec": {"metrics": [dict(study.metric)], "parameters": list(study.parameters)},
        "maxTrialCount": study.trials,
        "parallelTrialCount": study.parallel,
        "trialJobSpec": spec,
    }
    return made | ({"labels": dict(study.labels)} if study.labels else {})


def custom_job(name: str, spec: dict, labels: Mapping[str, str]) -> dict:
    """A CustomJob, as it is sent."""
    return {"displayName": name, "jobSpec": spec, **({"labels": dict(labels)} if labels else {})}
