"""Refused options of `ctl deploy vertex`: one sentence, exit code 2 and no output."""

import pytest
from ctl import cli
from golden_cases import IMAGE, OUTPUT, PROGRAM

TENSORBOARD = "projects/p/locations/us-central1/tensorboards/1"
STUDY = ["--metric=accuracy"]


@pytest.mark.parametrize(("options", "message"), [
    (["--image=flowers"], "has no tag"),
    (["--image=flowers:latest"], "has the tag latest"),
    (["--image=Flowers:1"], "is not an image"),
    (["--image=gcr.io/p/f:1 "], "is not an image"),
    (["--workers=0"], "expected a whole number from 1 to 1000"),
    (["--workers=2.5"], "expected a whole number"),
    (["--machine_type=big"], "is not a machine type"),
    (["--accelerator=V100:2"], "expected e.g. NVIDIA_TESLA_V100:2"),
    (["--accelerator=nvidia-tesla-t4"], "is not a GPU of Vertex AI"),
    (["--accelerator=TPU_V3:8"], "is not a GPU of Vertex AI"),
    (["--accelerator=NVIDIA_TESLA_T4:two"], "is not a GPU of Vertex AI"),
    (["--accelerator=NVIDIA_TESLA_T4:0"], "is not a GPU of Vertex AI"),
    (["--reduction_server=4", "--workers=2"], "requires GPUs, whose gradients it reduces"),
    (["--reduction_server=4", "--accelerator=NVIDIA_TESLA_T4:1"], "requires several workers"),
    (["--reduction_server=4", "--ps=1", "--workers=2"], "both use the third worker pool"),
    (["--reduction_server=many"], "is not a count"),
    (["--ps=1"], "expected --workers=2 or more"),
    (["--disk_gb=0"], "expected a whole number from 1"),
    (["--base_output=/gcs/b/x"], "is not a Cloud Storage path"),
    (["--base_output=gs://B/x"], "is not a Cloud Storage path"),
    (["--timeout=1w"], "is not a duration"),
    (["--timeout=0h"], "is not a duration"),
    (["--service_account=me"], "is not an e-mail address"),
    (["--network=default"], "projects/NUMBER/global/networks/NAME"),
    (["--network=projects/my-project/global/networks/default"], "the number of the project"),
    (["--tensorboard=987"], "is not a TensorBoard"),
    ([f"--tensorboard={TENSORBOARD}"], "requires --service_account"),
    ([f"--tensorboard={TENSORBOARD}", "--service_account=a@b.com", "--region=europe-west4"], "same region"),
    (["--name="], "expected 1 to 128"),
    (["--name=" + "x" * 129], "has 129 characters"),
    (["--label=Team=x"], "is not a label"),
    (["--label=team"], "is not a label"),
    (["--label=team=x", "--label=team=y"], "was given twice"),
    (["--project=My Project"], "is not a project"),
    (["--region=us"], "is not a region"),
    (["--env=A"], "is not a variable"),
    (["--env=A=1", "--env=A=2"], "was given twice"),
    (["--env=TF_CONFIG={}"], "identifies the process"),
    (["--env=CTL_WORKERS=a:1"], "identifies the process"),
    (["--env=HF_TOKEN=abc"], "HF_TOKEN, which looks like a secret"),
    (["--env=API_KEY=abc"], "Secret Manager"),
    (["--env=URL=https://me:pw@host/x"], "has a URL with a password"),
    (["--env=A=AKIAABCDEFGHIJKLMNOP"], "looks like a key"),
    ([f"--env=A{i}=1" for i in range(101)], "expected at most 100"),
    (["--tune=lr"], "is not a range"),
    (["--tune=1r:1..2"], "is not a range"),
    (["--tune=lr:1..2"], "--tune requires --metric"),
    (["--tune=lr:2..1", *STUDY], "the smaller one first: lr:1..2"),
    (["--tune=lr:1..1", *STUDY], "two different numbers"),
    (["--tune=lr:0..1:log", *STUDY], "expected numbers above 0"),
    (["--tune=lr:1..2:cubic", *STUDY], "has the scale 'cubic'"),
    (["--tune=lr:a..b", *STUDY], "does not have two numbers"),
    (["--tune=lr:1..2..3", *STUDY], "does not have two numbers"),
    (["--tune=lr:1..1e999", *STUDY], "does not have two numbers"),
    (["--tune=lr:adam", *STUDY], "not have two different values"),
    (["--tune=lr:a|a", *STUDY], "not have two different values"),
    (["--tune=lr:1..2", "--tune=lr:3..4", *STUDY], "was given twice"),
    (["--tune=data_dir:a|b", *STUDY], "--data_dir is tuned, and the program has a value"),
    (["--tune=lr:1..2", "--metric=loss"], "expected loss:minimize"),
    (["--tune=lr:1..2", "--metric=accuracy:max"], "expected accuracy:minimize or accuracy:maximize"),
    (["--tune=lr:1..2", *STUDY, "--trials=3", "--parallel_trials=4"], "greater than --trials=3"),
    (["--trials=3"], "requires --tune; expected"),
    (["--metric=accuracy"], "requires --tune; expected"),
    (["--format=xml"], "invalid choice"),
    (["--worker=2"], "is not an option"),
    (["--env=A=one\ntwo"], "has a line break"),
])  # fmt: skip
def test_a_mistake_is_one_sentence_and_writes_nothing(options, message, capsys, tmp_path):
    path = tmp_path / "job.yaml"
    image = [] if any(o.startswith("--image") for o in options) else [IMAGE]
    output = [] if any(o.startswith(("--base", "--tensor")) for o in options) else [OUTPUT]
    if any("--region" in o and "europe" in o for o in options):
        output = [OUTPUT]
    code = cli.main(["deploy", "vertex", *image, *output, *options, f"--output={path}", *PROGRAM])
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and not path.exists()
    assert captured.err.startswith("ctl deploy vertex: ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(("arguments", "message"), [
    ([OUTPUT, *PROGRAM], "are required: --image; expected e.g. ctl deploy vertex --image="),
    ([IMAGE, "--evaluator", *PROGRAM], "--evaluator requires the checkpoints"),
    ([IMAGE, OUTPUT, "--evaluator", *PROGRAM, "--model_dir=/tmp/x"], "is local to the machine"),
    ([IMAGE, OUTPUT, "--tune=lr:1..2", "--metric=m"], "--tune requires a program"),
    ([IMAGE, OUTPUT, "--tune=lr:1..2", "--metric=accuracy", *PROGRAM, "--report_hypertune=loss"],
     "so no trial would report accuracy"),
    ([IMAGE, "python", "-m", "trainer.task"], "write the program after `--`"),
    ([IMAGE, *PROGRAM, "--wandb_api_key=abc"], "wandb_api_key, which looks like a secret"),
    ([IMAGE, *PROGRAM, "--password", "abc"], "password, which looks like a secret"),
    ([IMAGE, "--", "sh", "-c", "DB_PASSWORD=abc python t.py"], "DB_PASSWORD, which looks like"),
    ([IMAGE, *PROGRAM, "--db=postgres://me:pw@host/db"], "has a URL with a password"),
])  # fmt: skip
def test_an_incomplete_line_or_one_with_secrets_is_refused(arguments, message, capsys):
    code = cli.main(["deploy", "vertex", *arguments])
    captured = capsys.readouterr()
    assert code == 2 and message in captured.err and "abc" not in captured.err and "pw@" not in captured.err


@pytest.mark.parametrize("flag", [
    "--max_tokens=512", "--tokenizer=bert", "--token_length=8", "--mask_token=[MASK]", "--image_key=image",
    "--key_dim=64", "--num_tokens=3", "--keyboard=1", "--primary_key_column=id",
    "--task=sk-learn-and-others",
    "--page=https://host/x?to=me@host", "--password_file=/run/secrets/p", "--url=https://host:8080/x",
    "--monkey=1",
])  # fmt: skip
def test_names_that_only_resemble_secrets_are_accepted(flag, capsys):
    assert cli.main(["deploy", "vertex", IMAGE, OUTPUT, *PROGRAM, flag]) == 0
    assert flag in capsys.readouterr().out
