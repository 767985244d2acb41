"""A job of Vertex AI as its API has it, from the templates: CustomJobSpec, or HyperparameterTuningJob."""

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
    """One job, as it is written and as it is sent.

    Attributes:
      name: how it is shown.
      spec: what the file holds: a CustomJobSpec, or a whole HyperparameterTuningJob.
      is_tuning: which of them.
      labels: of the job; in the file only for tuning.
    """

    name: str
    spec: Document
    is_tuning: bool
    labels: dict[str, str]

    @property
    def has_gap(self) -> bool:
        """Whether `gcloud ai custom-jobs create` refuses the file, as of version 528."""
        return not self.is_tuning and {} in self.spec["workerPoolSpecs"]

    def as_sent(self) -> Document:
        """What the API takes."""
        if self.is_tuning:
            return self.spec
        labels = {"labels": self.labels} if self.labels else {}
        return {"displayName": self.name, "jobSpec": self.spec, **labels}


def job_of(line: CommandLine, region: str) -> VertexJob:
    """The job of a command line."""
    options, tuned = line.options, line.options.metric or {}
    name = options.name or options.image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    labels = validators.named_values("--label", options.label)
    args = line.args
    if tuned and line.flag("report_hypertune") is None:
        args = [*args, f"--report_hypertune={tuned['metric']}"]
    spec = _custom_job(line, region, args)
    if tuned:
        trials, parallel = tuning.trials(options)
        values = {
            **tuned,
            "name": name,
            "parameters": options.tune,
            "trials": trials,
            "parallel_trials": parallel,
            "custom_job": spec,
            "labels": labels or None,
        }
        spec = manifest.document("vertex_tuning_job.yaml", values)
    return VertexJob(name, spec, is_tuning=bool(tuned), labels=labels)


def _custom_job(line: CommandLine, region: str, args: list[str]) -> Document:
    """The CustomJobSpec; when a worker starts again all do, but not with parameter servers."""
    options = line.options
    env = [{"name": k, "value": v} for k, v in validators.variables(options.env).items()]
    program = {"command": line.command or None, "args": args or None, "env": env or None}
    nothing = dict.fromkeys((*program, "accelerator", "accelerator_count"))
    gpu, _, count = (options.accelerator or "").partition(":")
    gpus = {"accelerator": gpu or None, "accelerator_count": int(count or 1) if gpu else None}

    def pool(replicas: int, machine_type: str, image: str, own: dict[str, Any]) -> Document | None:
        """A WorkerPoolSpec; one without replicas is empty."""
        values = {
            "replicas": replicas,
            "machine_type": machine_type,
            "image": image,
            "disk_gb": options.disk_gb,
        }
        return manifest.document("vertex_worker_pool.yaml", nothing | values | own) if replicas else {}

    training, side = options.machine_type, options.side_machine_type
    pools = [
        pool(1, training, options.image, gpus | program),
        pool(options.workers - 1, training, options.image, gpus | program),
        pool(options.ps, side, options.image, program),
        pool(int(options.evaluator), side, options.image, program),
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
    return manifest.document("vertex_custom_job.yaml", values)
