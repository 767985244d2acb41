"""`ctl deploy vertex`: worker pools, their validation by the API's messages, and output for users."""

import shlex

import pytest
import yaml
from conftest import some_of
from ctl import cli
from golden_cases import CASES, IMAGE, OUTPUT, PROGRAM
from google.protobuf import json_format
from regenerate import manifest


def deploy(capsys, *arguments):
    code = cli.main(["deploy", "vertex", *arguments])
    return code, capsys.readouterr()


def make_job(capsys, *options, program=PROGRAM):
    code, captured = deploy(capsys, IMAGE, OUTPUT, *options, *program)
    assert code == 0, captured.err
    return yaml.safe_load(captured.out), captured.err


def as_message(document):
    """Returns the document as an API message. Unknown fields, types or enum values are errors."""
    from google.cloud.aiplatform_v1 import types  # late: it takes seconds

    message_class = types.HyperparameterTuningJob if "studySpec" in document else types.CustomJobSpec
    return json_format.ParseDict(document, message_class.pb(message_class()))


@pytest.mark.parametrize(
    "name", some_of([n for n in CASES if n.startswith("vertex")])
)  # the import takes seconds
def test_the_api_has_every_field_and_value(name):
    message = as_message(yaml.safe_load(manifest(CASES[name])))
    assert json_format.ParseDict(json_format.MessageToDict(message), type(message)()) == message


@pytest.mark.slow
def test_the_api_s_messages_detect_mistakes():
    valid_job = yaml.safe_load(manifest(CASES["vertex_workers.yaml"]))
    for field, value in [
        ("workerPoolSpec", []), ("scheduling", {"restartJobsOnWorkerRestart": True}),
        ("scheduling", {"strategy": "CHEAP"}), ("scheduling", {"timeout": "1d"}),
        ("workerPoolSpecs", [{"machineSpec": {"acceleratorType": "NVIDIA_V100"}}]),
        ("workerPoolSpecs", [{"containerSpec": {"args": "--a"}}]),
        ("workerPoolSpecs", [{"containerSpec": {"env": [{"name": "A", "value": 1}]}}]),
    ]:  # fmt: skip
        with pytest.raises(json_format.ParseError):
            as_message({**valid_job, field: value})


@pytest.mark.parametrize(("workers", "counts"), [(1, [1]), (2, [1, 1]), (5, [1, 4])])
def test_the_chief_is_one_of_the_workers(capsys, workers, counts):
    job, _ = make_job(capsys, f"--workers={workers}")
    assert [p["replicaCount"] for p in job["workerPoolSpecs"]] == counts
    containers = [p["containerSpec"] for p in job["workerPoolSpecs"]]
    assert all(c == containers[0] for c in containers)


@pytest.mark.parametrize(("options", "counts"), [
    (["--evaluator"], [1, None, None, 1]),
    (["--evaluator", "--workers=3"], [1, 2, None, 1]),
    (["--ps=2", "--workers=3"], [1, 2, 2]),
    (["--ps=2", "--workers=3", "--evaluator"], [1, 2, 2, 1]),
    (["--reduction_server=4", "--workers=2", "--accelerator=NVIDIA_TESLA_V100:2"], [1, 1, 4]),
])  # fmt: skip
def test_each_pool_is_at_its_place(capsys, options, counts):
    job, _ = make_job(capsys, *options)
    assert [p.get("replicaCount") for p in job["workerPoolSpecs"]] == counts


def test_all_that_train_have_the_same_gpus_and_the_others_none(capsys):
    job, _ = make_job(capsys, "--workers=3", "--evaluator", "--accelerator=NVIDIA_TESLA_T4:2")
    gpus = [p.get("machineSpec", {}).get("acceleratorCount") for p in job["workerPoolSpecs"]]
    assert gpus == [2, 2, None, None]


def test_a_lost_worker_starts_all_again_but_for_parameter_servers(capsys):
    assert make_job(capsys, "--workers=2")[0]["scheduling"]["restartJobOnWorkerRestart"] is True
    assert "scheduling" not in make_job(capsys, "--workers=2", "--ps=1")[0]


def test_the_program_is_command_and_flags(capsys):
    program = ["--", "python", "-m", "models.flowers", "--data_dir", "/gcs/b/d", "--", "x"]
    container = make_job(capsys, program=program)[0]["workerPoolSpecs"][0]["containerSpec"]
    assert container["command"] == ["python", "-m", "models.flowers"]
    assert container["args"] == ["--data_dir", "/gcs/b/d", "--", "x"]
    only_flags = make_job(capsys, program=["--", "--steps=1e3"])[0]["workerPoolSpecs"][0]["containerSpec"]
    assert "command" not in only_flags and only_flags["args"] == ["--steps=1e3"]


def test_a_study_varies_flags_and_the_program_reports_the_metric(capsys):
    job, message = make_job(capsys, "--tune=units:32..512", "--tune=rate:.1..2", "--metric=accuracy")
    assert job["studySpec"]["metrics"] == [{"metricId": "accuracy", "goal": "MAXIMIZE"}]
    kinds = [next(k for k in p if k.endswith("Spec")) for p in job["studySpec"]["parameters"]]
    assert kinds == ["integerValueSpec", "doubleValueSpec"]
    container = job["trialJobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    assert container["args"][-1] == "--report_hypertune=accuracy"
    assert "gcloud ai hp-tuning-jobs create" in message and "--root" in message
    program = [*PROGRAM, "--report_hypertune=accuracy"]
    job, _ = make_job(capsys, "--tune=units:32..512", "--metric=accuracy", program=program)
    args = job["trialJobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
    assert [a for a in args if "hypertune" in a] == ["--report_hypertune=accuracy"]


def test_strings_that_resemble_numbers_stay_strings(capsys):
    value_by_name = {
        "A": "1e-4",
        "B": "yes",
        "C": "0x1F",
        "D": "12:30",
        "E": "",
        "F": "~",
        "G": "2026-01-01",
    }
    job, _ = make_job(capsys, *(f"--env={k}={v}" for k, v in value_by_name.items()))
    env = job["workerPoolSpecs"][0]["containerSpec"]["env"]
    assert {e["name"]: e["value"] for e in env} == value_by_name
    _, captured = deploy(capsys, IMAGE, OUTPUT, "--env=A=1e-4", *PROGRAM)
    assert 'value: "1e-4"' in captured.out  # a float to readers of YAML 1.2, gcloud's and others


def test_the_next_command_has_project_and_region_of_the_image(capsys):
    _, output = make_job(capsys, "--name=my flowers", "--label=team=vision")
    assert (
        "  gcloud ai custom-jobs create --project=my-project --region=us-central1 '--display-name=my "
        "flowers' --labels=team=vision --config=job.yaml\n"
    ) in output
    _, output = deploy(capsys, "--image=ghcr.io/me/flowers:1", OUTPUT, *PROGRAM)
    assert "--project=PROJECT --region=REGION" in output.err


def test_fields_that_gcloud_refuses_are_sent_with_submit(capsys):
    _, message = make_job(capsys, "--workers=2", "--evaluator")
    assert "gcloud rejects" in message and message.rstrip().endswith(" ".join(["--submit", *PROGRAM]))


def test_placeholders_are_listed_in_the_file(capsys):
    options = ["--image=REGION-docker.pkg.dev/PROJECT/app/flowers:1", "--base_output=gs://BUCKET/x"]
    _, captured = deploy(capsys, *options, "--env=NCCL_DEBUG=INFO", *PROGRAM)
    assert captured.out.splitlines()[1:6] == [
        "#", "# fill in or create first:", "#   REGION", "#   PROJECT", "#   BUCKET",
    ]  # fmt: skip
    assert "  BUCKET\n" in captured.err


@pytest.mark.parametrize(("options", "flags", "warning"), [
    (["--workers=3", "--ps=1"], ["--strategy=multi_worker"], "does not use the parameter servers"),
    ([], ["--strategy=parameter_server"], "add --ps=N"),
    (["--workers=2"], ["--strategy=mirrored"], "would train alone"),
    ([], ["--model_dir=/tmp/x"], "is local to the machine"),
    ([], ["--model_dir=/mnt/lustre/x"], None),
    (["--tune=a:1..2", "--metric=m"], ["--model_dir=/gcs/b/x"], "all trials would train in the same"),
])  # fmt: skip
def test_what_looks_wrong_is_a_warning(capsys, options, flags, warning):
    message = make_job(capsys, *options, program=[*PROGRAM, *flags])[1]
    assert (warning in message) if warning else ("warning" not in message)


def test_the_command_of_a_json_file_is_printed_because_json_has_no_comments(capsys):
    _, message = make_job(capsys, "--format=json")
    [note] = [line for line in message.splitlines() if line.startswith("note: JSON has no comments")]
    line = note.partition("generates the file: ")[2]
    assert line == shlex.join(["ctl", "deploy", "vertex", IMAGE, OUTPUT, "--format=json", *PROGRAM])
    assert "JSON" not in make_job(capsys)[1]


def test_without_any_place_for_the_model_there_is_a_warning(capsys):
    _, captured = deploy(capsys, IMAGE, *PROGRAM)
    assert "the model has no output directory" in captured.err


def test_a_file_is_written_once_and_named_on_stdout(capsys, tmp_path):
    path = tmp_path / "new" / "job.yaml"
    code, captured = deploy(capsys, IMAGE, OUTPUT, f"--output={path}", *PROGRAM)
    assert code == 0 and captured.err == "" and captured.out.startswith(f"wrote {path}\n")
    assert f"--config={path}" in captured.out
    assert "--output" not in path.read_text()
    code, captured = deploy(capsys, IMAGE, OUTPUT, "--workers=2", f"--output={path}", *PROGRAM)
    assert (
        code == 2 and "exists with other content" in captured.err and "replicaCount: 1" in path.read_text()
    )


@pytest.mark.parametrize("options", [["--output=/dev/null/job.yaml"], ["--output=.", "--force"]])
def test_an_unwritable_file_is_one_sentence(capsys, options):
    code, captured = deploy(capsys, IMAGE, OUTPUT, *options, *PROGRAM)
    assert code == 2 and "cannot be written" in captured.err and captured.err.count("\n") == 1
