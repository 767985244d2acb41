"""`ctl deploy kubernetes --elastic`: its objects, its script, and the options that it refuses."""

import subprocess

import pytest
from ctl.deploy import command
from golden_cases import IMAGE, SHARED
from test_deploy_kubernetes import make_documents, of_kind

ELASTIC = "--elastic=2:4"
PROGRAMS = ("ssh", "ssh-keygen", "sshd")


def script_of(*options):
    [script] = of_kind(make_documents(ELASTIC, *options), "ConfigMap")["data"].values()
    return script


def test_each_pod_of_an_elastic_job_runs_the_script_with_the_program():
    all_documents = make_documents(ELASTIC, "--tensorboard", "--storage=1Gi", "--env=A=b")
    job = of_kind(all_documents, "Job")["spec"]
    assert (job["completions"], job["parallelism"]) == (4, 4)
    [container] = job["template"]["spec"]["containers"]
    assert container["command"] == ["sh", "/etc/ctl-elastic/start.sh"]
    assert container["args"] == SHARED[1:]
    assert container["env"] == [{"name": "A", "value": "b"}]  # no fixed list of peers
    files = of_kind(all_documents, "ConfigMap")["data"]
    assert list(files) == ["start.sh"]
    [volume] = [v for v in job["template"]["spec"]["volumes"] if v["name"] == "elastic"]
    config_map, secret = volume["projected"]["sources"]
    assert config_map["configMap"]["name"] == "flowers" and secret["secret"]["name"] == "flowers-ssh"


def test_only_the_training_pods_have_the_key():
    deployment = of_kind(make_documents(ELASTIC, "--tensorboard", "--storage=1Gi"), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["shm", "shared"]


def test_the_workers_of_an_elastic_job_may_use_all_ports_among_themselves():
    policy = of_kind(make_documents(ELASTIC, "--claim=c"), "NetworkPolicy")
    [rule] = policy["spec"]["ingress"]
    assert "ports" not in rule and rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


def test_the_launcher_gets_the_limits_of_the_job():
    script = script_of("--claim=c", "--max_restarts=7", "--grace_secs=60")
    assert "ctl launch --workers=2:4 --max_restarts=7 --grace_secs=50 " in script
    assert "getent ahostsv4 flowers)" in script


def test_the_next_commands_create_the_key_first(capsys):
    assert command.main(["kubernetes", IMAGE, ELASTIC, "--claim=c", "--namespace=n", *SHARED]) == 0
    next_commands = capsys.readouterr().err.partition("next:\n")[2].splitlines()
    assert [line.strip() for line in next_commands[:3]] == [
        "ssh-keygen -q -t ed25519 -N '' -f flowers-ssh.key",
        "kubectl create secret generic flowers-ssh --namespace=n --type=kubernetes.io/ssh-auth "
        "--from-file=ssh-privatekey=flowers-ssh.key",
        "rm flowers-ssh.key flowers-ssh.key.pub",
    ]


@pytest.mark.parametrize(("account", "has_programs", "sentence"), [
    ("trainer:x:1000:1000::/home/trainer:/bin/sh", False, "The image has no ssh; build it with"),
    ("trainer:x:1000:1000::/home/trainer:/usr/sbin/nologin", True, "sshd requires a login shell"),
    ("", True, "The image has no user"),
])  # fmt: skip
def test_an_unsuitable_image_ends_the_job_with_2_and_the_reason(tmp_path, account, has_programs, sentence):
    (tmp_path / "start.sh").write_text(script_of("--claim=c").replace("PATH=$PATH:/usr/sbin\n", ""))
    programs = {"getent": f"[ -n '{account}' ] && echo '{account}'", "id": "echo 1000"}
    programs |= dict.fromkeys(PROGRAMS if has_programs else (), "exit 9")
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    result = subprocess.run(
        ["/bin/sh", tmp_path / "start.sh"], env={"PATH": str(tmp_path)}, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 2 and sentence in result.stderr


@pytest.mark.parametrize(("options", "sentence"), [
    (["--elastic=3"], "is not a range; expected MIN:MAX"),
    (["--elastic=3:2"], "expected MIN:MAX with 1 <= MIN <= MAX"),
    (["--elastic=1:1"], "expected MIN:MAX with MAX >= 2"),
    ([ELASTIC, "--workers=3"], "--workers cannot be combined with --elastic=2:4: MAX is the number"),
    ([ELASTIC, "--flavor=tfjob"], "Kubeflow ends all pods if one is lost"),
    ([ELASTIC, "--gpus=1"], "elastic training uses CPUs"),
    ([ELASTIC, "--evaluator"], "the workers of an elastic job evaluate"),
])  # fmt: skip
def test_options_that_an_elastic_job_does_not_support_are_refused(capsys, options, sentence):
    assert command.main(["kubernetes", IMAGE, "--claim=c", *options, *SHARED]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("program", [[], ["--", "--model_dir=/shared/a"]])
def test_an_elastic_job_needs_a_program_that_its_launcher_can_start(capsys, program):
    assert command.main(["kubernetes", IMAGE, "--claim=c", ELASTIC, *program]) == 2
    assert "no program was given after `--`" in capsys.readouterr().err
