"""`ctl deploy docker`: the files, the rejected options, and a Dockerfile that is executed locally."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from conftest import ROOT
from ctl import cli
from ctl.deploy.docker import project
from lint_dockerfile import exec_form, parse, problems

WHEEL = "tf_ctl-0.1.0-py3-none-any.whl"
IMAGE = "us-central1-docker.pkg.dev/my-project/flower-app/flowers:1"


@pytest.fixture
def codelab(tmp_path):
    """The files of a codelab user: trainer/task.py, and a wheel of ctl."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "task.py").write_text("print('flowers')\n")
    (tmp_path / WHEEL).touch()
    return tmp_path


def deploy(capsys, *arguments):
    code = cli.main(["deploy", "docker", *map(str, arguments)])
    return code, capsys.readouterr()


def run(capsys, directory, *options, program=("python", "-m", "trainer.task")):
    return deploy(capsys, f"--output={directory}", *options, "--", *program)


def refused(capsys, directory, *options, program=("python", "-m", "trainer.task")):
    before = sorted(directory.iterdir())
    code, captured = run(capsys, directory, *options, program=program)
    assert code == 2 and captured.out == "" and sorted(directory.iterdir()) == before
    assert captured.err.startswith("ctl deploy docker: ") and captured.err.count("\n") == 1
    return captured.err


def test_the_codelab_s_directory_needs_three_commands(codelab, capsys):
    code, captured = run(capsys, codelab, f"--image={IMAGE}")
    assert code == 0 and captured.err == ""
    assert captured.out.splitlines()[-4:] == [
        "next:",
        "  gcloud auth configure-docker us-central1-docker.pkg.dev",
        f"  docker build --platform=linux/amd64 --tag={IMAGE} {codelab}",
        f"  docker push {IMAGE}",
    ]
    steps = parse((codelab / "Dockerfile").read_text())
    assert exec_form(steps[-1]) == ["python", "-m", "trainer.task"]
    assert [s.arguments for s in steps if s.keyword == "COPY"] == [
        f"{WHEEL} /opt/{WHEEL}", "trainer /app/trainer",
    ]  # fmt: skip
    assert (codelab / ".dockerignore").read_text().splitlines()[1:4] == ["*", f"!{WHEEL}", "!trainer"]


@pytest.mark.parametrize("options", [
    [], ["--gpu"], ["--python=3.13"], ["--base=python:3.11-slim@sha256:" + "0" * 64],
    ["--ctl=git+https://example.com/ctl@1a2b3c4"], ["--ctl=https://example.com/tf_ctl-0.1.0.tar.gz"],
    ["--ctl=https://example.com/tf_ctl-0.1.0-py3-none-any.whl"], ["--ctl=none"], ["--slim"], ["--ssh"],
], ids=lambda o: o[0] if o else "plain")  # fmt: skip
def test_every_variant_passes_the_rules(codelab, capsys, options):
    (codelab / "requirements.txt").write_text("pillow==12.0.0\n")
    (codelab / "constraints.txt").write_text("numpy==2.4.6\n")
    code, _ = run(capsys, codelab, *options)
    text = (codelab / "Dockerfile").read_text()
    assert code == 0 and problems(text) == []
    assert ("tensorflow[and-cuda]==2.21.0" in text) == ("--gpu" in options)
    assert ("tensorflow/include" in text) == ("--slim" in options)
    assert ("openssh-server" in text) == ("--shell /bin/sh trainer" in text) == ("--ssh" in options)
    assert ("--shell /usr/sbin/nologin trainer" in text) == ("--ssh" not in options)
    assert text.count("--constraint /opt/constraints.txt") == text.count("pip install")


def test_the_rules_detect_mistakes():
    valid_text = "FROM a:1\nRUN pip install --no-cache-dir tensorflow==2\n"
    valid_text += "COPY t /app/t\nUSER 1:1\nENTRYPOINT []\n"
    assert problems(valid_text) == []
    for old, new in [
        ("a:1", "a"), ("a:1", "a:latest"), ("==2", ""), ("--no-cache-dir ", ""), ("USER 1:1\n", ""),
        ("1:1", "0:0"), ("1:1", "trainer"), ("ENTRYPOINT []", "ENTRYPOINT python t"),
        ("COPY t", "COPY ../t"), ("COPY t", "ADD https://t"),
        ("COPY t /app/t\nUSER 1:1", "USER 1:1\nCOPY t /app/t"),
        ("RUN pip", "RUN apt-get install git\nRUN pip"), ("FROM a:1", "FROM a:1\nWORKDIR app"),
    ]:  # fmt: skip
        assert problems(valid_text.replace(old, new)), (old, new)


def test_the_header_writes_the_same_files_again(codelab, capsys):
    (codelab / "weights").mkdir()
    run(capsys, codelab, "--gpu", "--copy=weights", program=["python", "-m", "trainer.task", "--a=b c"])
    first = {n: (codelab / n).read_bytes() for n in ("Dockerfile", ".dockerignore")}
    line = first["Dockerfile"].decode().splitlines()[0]
    assert line.startswith("# ctl deploy docker ") and f"--ctl={WHEEL}" in line
    for name in first:
        (codelab / name).unlink()
    arguments = shlex.split(line[2:])[3:]
    assert deploy(capsys, f"--output={codelab}", *arguments)[0] == 0
    assert {n: (codelab / n).read_bytes() for n in first} == first


def test_a_file_of_the_user_is_not_overwritten(codelab, capsys):
    (codelab / ".dockerignore").write_text("mine\n")
    assert "exists with other content" in refused(capsys, codelab)
    assert run(capsys, codelab, "--force")[0] == 0
    assert run(capsys, codelab)[0] == 0  # the same content is no conflict


@pytest.mark.parametrize(("options", "program", "message"), [
    ([], ["python", "-m", "trainr.task"], "there is no trainr/ and no trainr.py"),
    ([], ["python", "../train.py"], "expected a path inside the directory"),
    ([], ["python", "train.py"], "not in"),
    ([], ["bash", "-c", "true"], "contains no module or script"),
    ([], ["--steps=3"], "begins with a flag, --steps"),
    ([], ["python", "-m", "trainer.task", "--api_key=abc"], "assigns a value to api_key"),
    (["--python=3.9"], None, "expected 3.10 or newer"),
    (["--tensorflow=2.21"], None, "expected a full version"),
    (["--tensorflow=1.15.0"], None, "from 2.16.0 on"),
    (["--base=python"], None, "has no tag"),
    (["--base=python:latest"], None, "has the tag latest"),
    (["--image=Not An Image"], None, "is not an image"),
    (["--ctl=ctl"], None, "belongs to another project"),
    (["--ctl=ctl==0.1.0"], None, "belongs to another project"),
    (["--ctl=git+https://user:hush@example.com/ctl@1a2b3c4"], None, "has a URL with a password or a user"),
    (["--ctl=git+https://hush@example.com/org/ctl"], None, "has a URL with a password or a user"),
    (["--ctl=https://user:hush@example.com/ctl.tar.gz"], None, "has a URL with a password or a user"),
    (["--ctl", "git+https://hush@example.com/ctl@1a2b3c4"], None, "has a URL with a password or a user"),
    (["--ctl=git+https://example.com/ctl"], None, "does not specify a commit"),
    (["--ctl=git+https://example.com/ctl@main"], None, "does not specify a commit"),
    (["--ctl=git+ssh://git@example.com/ctl@1a2b3c4"], None, "is not supported"),
    (["--ctl=git+https://example.com/$(id)@1a2b3c4"], None, "is not supported"),
    (["--ctl=https://example.com/$(id).tar.gz"], None, "is not supported"),
    (["--ctl=."], None, "is not the source tree"),
    (["--copy=/etc"], None, "expected a path inside the directory"),
    (["--gppu"], None, "is not an option"),
])  # fmt: skip
def test_a_mistake_is_one_sentence_and_writes_nothing(codelab, capsys, options, program, message):
    program = program or ["python", "-m", "trainer.task"]
    message_of_error = refused(capsys, codelab, *options, program=program)
    assert message in message_of_error and "hush" not in message_of_error


def test_a_wheel_at_a_url_is_fetched_by_pip_and_not_copied(codelab, capsys):
    url = "https://example.com/tf_ctl-0.1.0-py3-none-any.whl"
    assert run(capsys, codelab, f"--ctl={url}")[0] == 0
    text = (codelab / "Dockerfile").read_text()
    assert f'pip install --no-cache-dir "{url}"' in text and f"COPY {url}" not in text
    assert url not in (codelab / ".dockerignore").read_text().split("\n", 1)[1]


def test_without_a_wheel_of_ctl_the_package_of_another_project_is_not_taken(codelab, capsys):
    (codelab / WHEEL).unlink()
    assert "belongs to another project" in refused(capsys, codelab)


def test_the_image_runs_python_as_its_first_process_and_gets_sigterm(tmp_path, capsys):
    """Exec form, without a shell: a signal to process 1 of a container reaches Python's handler."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "task.py").write_text(
        "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "print('ready', flush=True)\nsignal.pause()\n"
    )
    assert run(capsys, tmp_path, "--ctl=none")[0] == 0
    text = (tmp_path / "Dockerfile").read_text()
    command = exec_form(parse(text)[-1])
    process = subprocess.Popen([sys.executable, *command[1:]], cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143


@pytest.mark.slow
def test_the_steps_of_the_dockerfile_make_an_environment_that_trains(tmp_path, capsys):
    """Executes the Dockerfile without a container: a new environment, copies and three steps."""
    context, root = tmp_path / "context", tmp_path / "root"
    context.mkdir()
    for name in (*project.SOURCE_TREE, "models"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, context / name)
    assert run(capsys, context, "--slim", program=["python", "-m", "models.mnist"])[0] == 0
    venv.create(root / "venv", with_pip=True)
    executed, workdir = [], root
    for step in parse((context / "Dockerfile").read_text()):
        executed.append(step.keyword)
        if step.keyword == "WORKDIR":
            workdir = root / step.arguments.lstrip("/")
            workdir.mkdir(parents=True)
        elif step.keyword == "COPY":
            *sources, target = step.arguments.split()
            target_path = root / target.lstrip("/")
            for name in sources:
                copy(context / name, target_path / name if target.endswith("/") else target_path)
        elif step.keyword == "RUN" and step.arguments.startswith("pip "):
            local_arguments = step.arguments.replace("/opt/", f"{root}/opt/")
            call(["sh", "-c", local_arguments], root, PATH=f"{root}/venv/bin:{os.environ['PATH']}")
    assert {"WORKDIR", "COPY", "RUN", "ENTRYPOINT"} <= set(executed)
    assert not list(root.glob("venv/lib/*/site-packages/tensorflow/include"))
    entry = exec_form(parse((context / "Dockerfile").read_text())[-1])
    output = call(
        [root / "venv/bin/python", *entry[1:], "--train_steps=3", "--num_virtual_devices=0"], workdir
    )
    assert "3" in output
    assert "usage:" in call([root / "venv/bin/python", *entry[1:], "--help"], workdir)
    slurm = ["-m", "ctl", "deploy", "slurm", "--", "python", "train.py"]
    assert "#SBATCH" in call([root / "venv/bin/python", *slurm], workdir)  # templates are installed


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


def call(command, cwd, **variables) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**clean, **variables}, timeout=900, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]
    return result.stdout
