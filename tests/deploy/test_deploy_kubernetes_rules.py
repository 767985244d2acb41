"""Errors and warnings of `ctl deploy kubernetes`, one sentence each."""

import pytest
from ctl import cli
from golden_cases import IMAGE, SHARED

STORED = "--storage=1Gi"
NAMED = ["--flavor=trainjob", "--runtime=plain"]


@pytest.mark.parametrize(("options", "message"), [
    ([STORED, "--image=flowers"], "has no tag"),
    ([STORED, "--name=Flowers"], "expected lower-case letters"),
    ([STORED, "--name=1flowers"], "a letter first"),
    ([STORED, "--name=" + "f" * 41], "at most 40 characters"),
    ([STORED, "--image=ghcr.io/me/1flowers:1"], "such as --name=flowers-1"),
    ([STORED, "--node_selector=zone=a", "--node_selector=zone=b"], "was given twice"),
    ([STORED, "--namespace=My Space"], "expected lower-case letters"),
    ([STORED, "--workers=0"], "from 1 to 1000"),
    ([STORED, "--ps=1", "--workers=2"], "expected --flavor=tfjob"),
    ([STORED, "--ps=1", "--flavor=tfjob"], "expected --workers=2 or more"),
    ([STORED, "--flavor=pytorchjob"], "invalid choice"),
    ([STORED, "--runtime=plain"], "expected --flavor=trainjob"),
    ([STORED, "--runtime=plain", "--flavor=trainjob"], "which defines its pods and their volumes"),
    *(([*NAMED, option], "which defines its pods") for option in (
        "--max_restarts=2", "--grace_secs=60", "--node_selector=zone=a", "--service_account=me",
        "--shm=2Gi", "--mount=/data", "--tensorboard")),
    ([*NAMED, "--evaluator"], "none of that runtime's volumes"),
    ([STORED, "--cpu=two"], "is not a quantity"),
    ([STORED, "--cpu=0"], "is not a quantity"),
    ([STORED, "--memory=4"], "expected e.g. 4Gi"),
    ([STORED, "--memory=4m"], "expected e.g. 4Gi"),
    ([STORED, "--memory=4GB"], "expected e.g. 4Gi"),
    ([STORED, "--shm=big"], "is not a quantity"),
    (["--storage=10"], "expected e.g. 4Gi"),
    ([STORED, "--gpus=two"], "expected a whole number from 0"),
    ([STORED, "--claim=data"], "expected an existing volume, or a size"),
    (["--storage_class=nfs"], "without --storage=SIZE"),
    ([STORED, "--storage_class=N F S"], "is not a Kubernetes name"),
    (["--claim=My_Data"], "is not a Kubernetes name"),
    ([STORED, "--mount=shared"], "expected a path such as /shared"),
    ([STORED, "--mount=/dev/shm"], "expected a path such as /shared"),
    ([STORED, "--node_selector=gpu"], "is not a label"),
    ([STORED, "--service_account=Me"], "is not a Kubernetes name"),
    ([STORED, "--timeout=soon"], "is not a duration"),
    ([STORED, "--grace_secs=0"], "from 1 to 3600"),
    ([STORED, "--env=HF_TOKEN=abc"], "use --env_from_secret=NAME=secret:key"),
    ([STORED, "--env=TF_CONFIG={}"], "identifies the process"),
    ([STORED, "--env_from_secret=HF_TOKEN=abc"], "expected NAME=SECRET:KEY"),
    ([STORED, "--env_from_secret=CTL_WORKERS=a:b"], "is set elsewhere"),
    ([STORED, "--env=A=1", "--env_from_secret=A=a:b"], "is set elsewhere"),
    ([], "no volume is mounted there"),
    ([STORED, "--mount=/data", "--workers=2"], "the other pods cannot access it"),
    ([STORED, "--mount=/data", "--tensorboard"], "the other pods cannot access it"),
    ([STORED, "--gpu=1"], "is not an option"),
])  # fmt: skip
def test_a_mistake_is_one_sentence_and_writes_nothing(options, message, capsys, tmp_path):
    path = tmp_path / "job.yaml"
    image = [] if any(o.startswith("--image") for o in options) else [IMAGE]
    code = cli.main(["deploy", "kubernetes", *image, *options, f"--output={path}", *SHARED])
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and not path.exists()
    assert captured.err.startswith("ctl deploy kubernetes: ") and captured.err.count("\n") == 1
    assert message in captured.err and "abc" not in captured.err


@pytest.mark.parametrize(("options", "flags", "message"), [
    (["--tensorboard"], [], "--tensorboard requires --model_dir=PATH"),
    (["--tensorboard"], ["--model_dir=gs://b/f"], "to directories, not to"),
    (["--evaluator"], [], "--evaluator requires the checkpoints"),
    ([], ["--api_key=abc"], "use --env_from_secret=NAME=secret:key"),
])  # fmt: skip
def test_the_program_s_flags_are_looked_at(options, flags, message, capsys):
    arguments = ["deploy", "kubernetes", IMAGE, *options, "--", "python", "-m", "trainer.task", *flags]
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("options", "flags", "warning"), [
    (["--workers=2", STORED], ["--model_dir=/shared/f", "--strategy=mirrored"], "would train alone"),
    ([STORED], ["--model_dir=/shared/f", "--strategy=parameter_server"], "add --ps=N and --flavor=tfjob"),
    (["--flavor=tfjob", "--workers=2", "--ps=1", STORED],
     ["--model_dir=/shared/f", "--strategy=auto"], None),
    (["--flavor=tfjob", "--workers=2", "--ps=1", STORED],
     ["--model_dir=/shared/f", "--strategy=multi_worker"], "does not use the parameter servers"),
    (["--node_selector=cloud.google.com/gke-accelerator=nvidia-l4"], ["--model_dir=gs://b/f"],
     "reject pods without GPUs"),
    (["--node_selector=zone=a"], ["--model_dir=gs://b/f"], None),
    ([], ["--model_dir=/tmp/f"], "is lost with it"),
    ([], [], "has no --model_dir"),
    (["--workers=2"], ["--model_dir=gs://b/f"], None),
])  # fmt: skip
def test_what_looks_wrong_is_a_warning(options, flags, warning, capsys):
    arguments = ["deploy", "kubernetes", IMAGE, *options, "--", "python", "-m", "trainer.task", *flags]
    assert cli.main(arguments) == 0
    messages = capsys.readouterr().err
    assert (warning in messages) if warning else ("warning" not in messages)


@pytest.mark.parametrize("pair", ["CTL_OBJECT_STORES=/shared", "CTL_PORT=3333"])
def test_variables_that_are_the_same_in_all_processes_are_let_through(pair, capsys):
    assert cli.main(["deploy", "kubernetes", IMAGE, STORED, f"--env={pair}", *SHARED]) == 0
    assert pair.partition("=")[2] in capsys.readouterr().out


def test_prerequisites_are_listed_in_the_file(capsys):
    arguments = ["--claim=data", "--env_from_secret=HF_TOKEN=hugging-face:token", *SHARED]
    assert cli.main(["deploy", "kubernetes", IMAGE, *arguments]) == 0
    text = capsys.readouterr().out
    assert "#   PersistentVolumeClaim data, writable by all nodes\n" in text
    assert "#   Secret hugging-face with the key token\n" in text
