"""Vertex AI jobs in the format of the API: CustomJobSpec or HyperparameterTuningJob."""

from dataclasses import dataclass
from typing import Any

from ctl.deploy import manifest, validators
from ctl.deploy.args import CommandLine
from ctl.deploy.manifest import Document
from ctl.deploy.vertex import tuning

_REDUCTION_IMAGE = "{area}-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
_REDUCTION_MACHINE = "n1-highcpu-16"


@dataclass(frozen=True)
class VertexJob:
    """A job in its file format and its request format.

    Attributes:
      name: Display name.
      spec: Content of the file: a CustomJobSpec, or a complete HyperparameterTuningJob.
      is_tuning: True for a HyperparameterTuningJob.
      labels: Labels of the job. The file contains them only for tuning.
    """

    name: str
    spec: Document
    is_tuning: bool
    labels: dict[str, str]

    @property
    def has_gap(self) -> bool:
        """True if `gcloud ai custom-jobs create` rejects the file, as of version 528."""
        return not self.is_tuning and {} in self.spec["workerPoolSpecs"]

    def to_request(self) -> Document:
        """Returns the request body of the API."""
        if self.is_tuning:
            return self.spec
        labels = {"labels": self.labels} if self.labels else {}
        return {"displayName": self.name, "jobSpec": self.spec, **labels}


def build_job(line: CommandLine, region: str) -> VertexJob:
    """Returns the job of a command line."""
    options, tuned = line.options, line.options.metric or {}
    name = options.name or options.image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    labels = validators.parse_assignments("--label", options.label)
    args = line.args
    if tuned and line.flag("report_hypertune") is None:
        args = [*args, f"--report_hypertune={tuned['metric']}"]
    spec = _custom_job(line, region, args)
    if tuned:
        trials, parallel = tuning.trial_counts(options)
        values = {
            **tuned,
            "name": name,
            "parameters": options.tune,
            "trials": trials,
            "parallel_trials": parallel,
            "custom_job": spec,
            "labels": labels or None,
        }
        spec = manifest.fill_document("vertex_tuning_job.yaml", values)
    return VertexJob(name, spec, is_tuning=bool(tuned), labels=labels)


def _custom_job(line: CommandLine, region: str, args: list[str]) -> Document:
    """Returns the CustomJobSpec. A worker restart restarts all workers, except with parameter servers."""
    options = line.options
    env = [{"name": k, "value": v} for k, v in validators.parse_variables(options.env).items()]
    program = {"command": line.command or None, "args": args or None, "env": env or None}
    unset_values = dict.fromkeys((*program, "accelerator", "accelerator_count"))
    gpu, _, count = (options.accelerator or "").partition(":")
    gpus = {"accelerator": gpu or None, "accelerator_count": int(count or 1) if gpu else None}

    def pool(replicas: int, machine_type: str, image: str, pool_values: dict[str, Any]) -> Document | None:
        """Returns a WorkerPoolSpec, empty without replicas."""
        values = {
            "replicas": replicas,
            "machine_type": machine_type,
            "image": image,
            "disk_gb": options.disk_gb,
        }
        return (
            manifest.fill_document("vertex_worker_pool.yaml", unset_values | values | pool_values)
            if replicas
            else {}
        )

    training, side_machine_type = options.machine_type, options.side_machine_type
    pools = [
        pool(1, training, options.image, gpus | program),
        pool(options.workers - 1, training, options.image, gpus | program),
        pool(options.ps, side_machine_type, options.image, program),
        pool(int(options.evaluator), side_machine_type, options.image, program),
    ]
    if options.reduction_server:
        replicas, _, machine_type = options.reduction_server.partition(":")
        area = region.partition("-")[0]
        image = _REDUCTION_IMAGE.format(area=area if area in ("europe", "asia") else "us")
        pools[2] = pool(int(replicas), machine_type or _REDUCTION_MACHINE, image, {})
    while not pools[-1]:
        pools.pop()
    pools += [None] * (4 - len(pools))
    values = {
        **vars(options),
        **dict(zip(("chief", "workers", "parameter_servers", "evaluator"), pools, strict=True)),
        "timeout": f"{options.timeout}s" if options.timeout else None,
        "restart_all": True if not options.ps else None,
        "strategy": "SPOT" if options.spot else None,
    }
    return manifest.fill_document("vertex_custom_job.yaml", values)
