"""The `ctl deploy vertex` command: writes a file for `gcloud ai custom-jobs create`, or submits the job."""

import re
import shlex
from pathlib import Path

from ctl.deploy import checks, manifest, output, validators
from ctl.deploy.args import CommandLine
from ctl.deploy.output import Advice
from ctl.deploy.vertex import checks as vertex_checks
from ctl.deploy.vertex import job as vertex_job
from ctl.deploy.vertex import options as vertex_options
from ctl.deploy.vertex.job import VertexJob
from ctl.errors import UsageError

parser = vertex_options.parser
_GOOGLE_IMAGE = re.compile(r"([a-z0-9-]+|[A-Z_]+)-docker\.pkg\.dev/([^/]+)/")


def write(line: CommandLine) -> None:
    """Writes the job. With --submit also sends it."""
    options = line.options
    project, region = _find_location(options.image, options.project, options.region)
    vertex_checks.check_job(line, region)
    job = vertex_job.build_job(line, region)
    blanks = validators.find_placeholders([line.as_text(), project, region])
    if options.submit and blanks:
        raise UsageError(f"--submit requires a complete job; {', '.join(blanks)} must be filled in first")
    if options.format == "json":
        text = manifest.as_json(job.spec)
    else:
        text = manifest.as_yaml([job.spec], manifest.file_header(line.as_text(), blanks))
    advice = Advice(
        fill_in=blanks,
        warnings=vertex_checks.vertex_warnings(line),
        notes=_notes(line, job),
        commands=[] if options.submit else _commands(line, job, project, region),
    )
    if not options.submit:
        output.deliver_manifest(line, text, advice, f"job.{options.format}")
        return
    written = [options.output] if options.output else []
    output.write_files({Path(path): text for path in written}, force=options.force)
    output.print_advice(advice, "", written=written, to_stdout=False)
    _submit(job, project, region)


def _find_location(image: str, project: str | None, region: str | None) -> tuple[str, str]:
    """Returns project and region: from the options, else from the name of the image, else placeholders."""
    match = _GOOGLE_IMAGE.match(image)
    image_location = (match[2], match[1]) if match else ("PROJECT", "REGION")
    if not re.fullmatch(vertex_options.REGION, image_location[1]):
        image_location = (image_location[0], "REGION")
    project = project or vertex_options.project(image_location[0])
    return project, region or image_location[1]


def _submit(job: VertexJob, project: str, region: str) -> None:
    from ctl.deploy.vertex import submit

    name = submit.submit(job.to_request(), project, region)
    job_path, page = "custom-jobs", "training"
    if job.is_tuning:
        job_path, page = "hyperparameter-tuning-jobs", "hyperparameter-tuning"
    print(
        f"submitted {name}\nsee https://console.cloud.google.com/vertex-ai/training/{job_path}"
        f"/locations/{region}/{page}/{name.rpartition('/')[2]}?project={project}"
    )


def _commands(line: CommandLine, job: VertexJob, project: str, region: str) -> list[str]:
    if job.has_gap:
        return [line.as_text("--submit")]
    gcloud = ["gcloud", "ai", "hp-tuning-jobs" if job.is_tuning else "custom-jobs"]
    location = [f"--project={project}", f"--region={region}"]
    create = [*gcloud, "create", *location, f"--display-name={job.name}"]
    if job.labels and not job.is_tuning:
        create.append("--labels=" + ",".join(f"{k}={v}" for k, v in job.labels.items()))
    watch = [*gcloud, "describe" if job.is_tuning else "stream-logs", "JOB", *location]
    return [f"{shlex.join(create)} --config={{file}}", shlex.join(watch)]


def _notes(line: CommandLine, job: VertexJob) -> list[str]:
    options, notes = line.options, []
    if options.format == "json" and (options.output or not options.submit):
        notes.append(
            f"JSON has no comments, so save the command line that generates the file: {line.as_text()}"
        )
    if job.has_gap and not options.submit:
        notes.append(
            "gcloud rejects a file with an unused worker pool before a used one; submit it with --submit"
        )
    if options.accelerator:
        notes.append(checks.GPU_IMAGE)
    if job.is_tuning:
        notes.append(
            "only root can write the metric of a trial: use an image of `ctl deploy docker --root`"
        )
    return notes
