"""The `ctl deploy vertex` command: a file for `gcloud ai custom-jobs create`, or the job itself."""

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctl.deploy import args as words
from ctl.deploy import lint, output, texts, validators
from ctl.deploy.args import Asked
from ctl.deploy.output import Advice
from ctl.deploy.vertex import options as vertex_options
from ctl.deploy.vertex import rules, tuning
from ctl.deploy.vertex.job import Container, Pools, Study, custom_job, custom_job_spec, tuning_job
from ctl.errors import UsageError
from ctl.io.console import quoted

_GOOGLE_IMAGE = re.compile(r"([a-z0-9-]+|[A-Z_]+)-docker\.pkg\.dev/([^/]+)/")
_PROJECT = re.compile(r"[a-z]([a-z0-9.:-]{0,61}[a-z0-9])?|[0-9]{1,20}|[A-Z][A-Z_]+")
_REGION = re.compile(r"[a-z]+-[a-z]+[0-9]{1,2}|[A-Z][A-Z_]+")


@dataclass(frozen=True)
class Made:
    """One job, as it is written and as it is sent.

    Attributes:
      name: how it is shown.
      spec: what the file holds: a CustomJobSpec, or a whole HyperparameterTuningJob.
      is_study: which of them.
      labels: of the job; in the file only for a study.
    """

    name: str
    spec: dict[str, Any]
    is_study: bool
    labels: dict[str, str]

    @property
    def has_gpus(self) -> bool:
        """True if a pool has accelerators."""
        return "acceleratorType" in json.dumps(self.spec)

    @property
    def has_a_gap(self) -> bool:
        """Whether `gcloud ai custom-jobs create` refuses the file, as of version 528."""
        return not self.is_study and {} in self.spec["workerPoolSpecs"]

    def as_sent(self) -> dict[str, Any]:
        """What the API takes."""
        return self.spec if self.is_study else custom_job(self.name, self.spec, self.labels)


def main(argv: Sequence[str]) -> int:
    """Writes the job; returns 0, 2 after one sentence about a mistake, 1 if the service refused it."""
    return words.guarded("vertex", lambda: _main(argv))


def _main(argv: Sequence[str]) -> None:
    asked = words.read(vertex_options.parser(), argv)
    if asked is None:
        return
    if not asked.options.image:
        raise UsageError(
            "--image is missing; expected the image that `ctl deploy docker` is for, e.g. "
            f"{vertex_options.EXAMPLE}"
        )
    validators.image(asked.options.image)
    project, region = _place(asked.options)
    pools = rules.pools(asked.options)
    made = _make(asked, pools, region)
    options = asked.options
    blanks = validators.blanks([*_texts(made.spec), project, region])
    if options.submit and blanks:
        raise UsageError(
            f"--submit came, but {', '.join(blanks)} must be filled in first; write the real names"
        )
    if options.format == "json":
        text = texts.as_json(made.spec)
    else:
        text = texts.as_yaml([made.spec], texts.header(asked.line(), blanks))
    advice = Advice(
        fill_in=blanks,
        warnings=rules.warnings(asked, pools.machine),
        notes=_notes(asked, made),
        commands=[] if options.submit else _commands(asked, made, project, region),
    )
    if options.submit:
        _write(text, options, advice)
        _submit(made, project, region)
        return
    output.deliver(text, options.output, advice, force=options.force, default=f"job.{options.format}")


def _make(asked: Asked, pools: Pools, region: str) -> Made:
    options = asked.options
    parameters = tuning.parameters(options.tune)
    rules.check_evaluator(asked)
    rules.check_tuning(asked, [p["parameterId"] for p in parameters])
    args = asked.args
    if parameters and asked.flag("report_hypertune") is None:
        args = [*args, f"--report_hypertune={tuning.metric(options.metric)['metricId']}"]
    container = Container(options.image, asked.command, args, validators.variables(options.env, "vertex"))
    spec = custom_job_spec(
        pools.specs(container, region), rules.surroundings(options, region), gang=not pools.ps
    )
    name, labels = rules.name(_name(options)), rules.labels(options.label)
    if not parameters:
        return Made(name, spec, is_study=False, labels=labels)
    study = Study(
        tuning.metric(options.metric),
        parameters,
        options.trials or 10,
        options.parallel_trials or 2,
        labels,
    )
    return Made(name, tuning_job(name, spec, study), is_study=True, labels=labels)


def _name(options: argparse.Namespace) -> str:
    if options.name is not None:
        return options.name
    last = options.image.partition("@")[0].rpartition("/")[2]
    return last.partition(":")[0]


def _place(options: argparse.Namespace) -> tuple[str, str]:
    """Project and region: as given, else those of an image of Artifact Registry, else blanks."""
    found = _GOOGLE_IMAGE.match(options.image)
    by_image = found[1] if found and _REGION.fullmatch(found[1]) else "REGION"
    region = options.region or by_image
    project = options.project or (found[2] if found else "PROJECT")
    if not _PROJECT.fullmatch(project):
        raise UsageError(f"--project={quoted(project)} is no project; expected its ID, such as my-project")
    if not _REGION.fullmatch(region):
        raise UsageError(f"--region={quoted(region)} is no region; expected one such as us-central1")
    return project, region


def _write(text: str, options: argparse.Namespace, advice: Advice) -> None:
    """Before a job is sent: its file, if one is wanted, and the advice, on stderr."""
    path = options.output
    if path is not None:
        output.write({Path(path): text}, force=options.force)
    output.tell(advice, path or "", to_stdout=False, written=[path] if path else [])


def _submit(made: Made, project: str, region: str) -> None:
    from ctl.deploy.vertex import submit

    name = submit.submit(made.as_sent(), project, region)
    kind = "training" if not made.is_study else "hyperparameter-tuning"
    last = name.rpartition("/")[2]
    print(
        f"submitted {name}\nsee https://console.cloud.google.com/vertex-ai/training/"
        f"{'custom-jobs' if kind == 'training' else 'hyperparameter-tuning-jobs'}"
        f"/locations/{region}/{kind}/{last}?project={project}"
    )


def _commands(asked: Asked, made: Made, project: str, region: str) -> list[str]:
    if made.has_a_gap:
        return [asked.line("--submit")]
    kind = "hp-tuning-jobs" if made.is_study else "custom-jobs"
    place = [f"--project={project}", f"--region={region}"]
    create = ["gcloud", "ai", kind, "create", *place, f"--display-name={made.name}"]
    if made.labels and not made.is_study:
        create.append("--labels=" + ",".join(f"{k}={v}" for k, v in made.labels.items()))
    commands = [f"{shlex.join(create)} --config={{file}}"]
    if made.is_study:
        return [*commands, shlex.join(["gcloud", "ai", kind, "describe", "JOB", *place])]
    return [*commands, shlex.join(["gcloud", "ai", kind, "stream-logs", "JOB", *place])]


def _notes(asked: Asked, made: Made) -> list[str]:
    options, found = asked.options, []
    if options.format == "json" and (options.output or not options.submit):
        found.append(f"JSON has no place for the line that writes it again; keep it: {asked.line()}")
    if made.has_a_gap and not options.submit:
        found.append(
            "gcloud refuses a file with an unused pool between others ({}), so this job is sent "
            "with --submit"
        )
    if made.has_gpus:
        found.append(lint.GPU_IMAGE)
    if made.is_study:
        found.append(
            "in the containers of Vertex AI only root may write what a trial writers: build the "
            "image with `ctl deploy docker --root`"
        )
    return found


def _texts(value: Any) -> list[str]:
    """All strings in a document, but for keys and the words of the API."""
    if isinstance(value, dict):
        kept = {
            k: v for k, v in value.items() if k not in ("acceleratorType", "goal", "scaleType", "strategy")
        }
        return [t for v in kept.values() for t in _texts(v)]
    if isinstance(value, list):
        return [t for v in value for t in _texts(v)]
    return [value] if isinstance(value, str) else []
