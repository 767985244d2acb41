"""Arguments that are read back unchanged from a manifest, for any content."""

import json
import re
import shlex
import sys

import pytest
import yaml
from conftest import ROOT, some_of
from ctl import cli
from ctl.deploy import args
from ctl.deploy import manifest as manifests
from ctl.distribute import job_fingerprint
from ctl.errors import UsageError
from golden_cases import IMAGE
from hypothesis import given, settings
from hypothesis import strategies as st
from regenerate import manifest
from test_deploy_kubernetes import make_documents, pod_templates

MAX_EXAMPLES = min(100, settings().max_examples)  # fewer in `make test`
WORDS = st.text(min_size=1).filter(str.isprintable)
NUMBERS = st.from_regex(r"\A[-+]?(0[xob])?[0-9_]*\.?[0-9]+([eE][-+]?[0-9]+)?\Z")
SWITCHES = st.sampled_from(["y", "N", "yes", "No", "on", "OFF", "true", "NULL", "~", "", ".inf", "-.NaN"])


@given(st.lists(st.one_of(WORDS, NUMBERS, SWITCHES)))
@settings(max_examples=MAX_EXAMPLES, deadline=None)
def test_a_text_is_read_back_as_it_was_and_no_number_is_plain(given_words):
    text = manifests.as_yaml([{"words": given_words}])
    assert yaml.safe_load(text)["words"] == given_words
    for line in text.splitlines()[1:]:  # other parsers accept more numbers than PyYAML
        assert not re.fullmatch(r"\s+- [-+]?\.?[0-9][0-9a-zA-Z_.+-]*", line), line
    assert json.loads(manifests.as_json({"words": given_words}))["words"] == given_words


@given(st.lists(WORDS, max_size=5), st.text("abc _=:'\"#$\\", max_size=20))
@settings(max_examples=MAX_EXAMPLES, deadline=None)
def test_the_first_line_is_one_line_with_the_same_arguments(program, value):
    line = args.CommandLine("vertex", None, ("python", *program), ("--image=a:1", f"--env=A={value}"))
    header = manifests.file_header(line.as_text())
    assert header.count("\n") == 1
    assert shlex.split(header.removeprefix("# "))[3:] == [*line.arguments, "--", *line.program]


@given(st.text("abc _=:'\"#$\\{}[]&*!|>%@`,?-", max_size=20))
@settings(max_examples=30, deadline=None)
def test_any_value_of_a_variable_comes_through_the_command(value):
    line = ["vertex", IMAGE, f"--env=A={value}", "--", "python", "-m", "t"]
    container = yaml.safe_load(manifest(line))["workerPoolSpecs"][0]["containerSpec"]
    assert container["env"] == [{"name": "A", "value": value}]


def expanded(text, variables):
    """Expands a string as Kubernetes does: `$(NAME)` is a variable's value, `$$` is `$`."""
    return re.sub(r"\$(?:(\$)|\(([^)]*)\))", lambda m: m[1] or variables.get(m[2], m[0]), text)


@pytest.mark.parametrize("flavor", some_of(["job", "tfjob", "trainjob"], "job"))
@given(st.text("$()A b", max_size=12))
@settings(max_examples=15, deadline=None)
def test_every_argument_is_unchanged_after_the_expansion_of_kubernetes(flavor, argument):
    options = ["--env=A=1", f"--env=B={argument}", "--tensorboard", "--evaluator", "--storage=1Gi"]
    program = ["--", "sh", f"x{argument}", f"--model_dir=/shared/f{argument}"]
    objects = make_documents(f"--flavor={flavor}", *options, program=program)
    containers = [t["spec"]["containers"][0] for t in pod_templates(objects)]
    containers += [d["spec"]["trainer"] for d in objects if d["kind"] == "TrainJob"]
    arrived = set()
    for container in containers:
        variables = {e["name"]: e["value"] for e in container.get("env", [])}
        arguments = [*container.get("command", []), *container.get("args", []), *variables.values()]
        arrived |= {expanded(w, {**variables, "b": "2"}) for w in arguments}
    assert {f"x{argument}", argument, f"--model_dir=/shared/f{argument}"} <= arrived
    assert f"--logdir=/shared/f{argument}/logs" in arrived


@given(st.lists(st.text(max_size=12), max_size=8))
@settings(deadline=None)
def test_no_line_ends_in_a_traceback(line):
    for platform in ("docker", "vertex", "kubernetes"):
        assert cli.main(["deploy", platform, "--output=/dev/null/x", *line, "--", "--a"]) in (0, 2)


def test_names_of_secrets():
    hidden = ["token", "api_token", "HF_TOKEN", "password", "db-password", "client.secret", "api_key",
              "apikey", "private_key",
              "aws_secret_access_key", "GOOGLE_APPLICATION_CREDENTIALS"]  # fmt: skip
    hidden += ["passphrase", "pwd", "auth", "key", "wandb_key", "openai_key", "db_pass", "token_value",
               "hf_token_2", "bearer", "TOKEN_V2", "DB_PASS",
               "AZURE_STORAGE_CONNECTION_STRING"]  # fmt: skip
    for of_variable in (False, True):
        assert [n for n in hidden if not job_fingerprint.looks_secret(n, of_variable=of_variable)] == []
    assert job_fingerprint.looks_secret("IMAGE_KEY", of_variable=True)
    harmless = ["max_tokens", "tokenizer", "num_tokens", "pad_token", "token_length", "image_key", "keys",
                "learning_rate", "secret_file", "monkey", "keyboard", "key_dim", "primary_key_column",
                "bypass", "num_keys", "author", "token_dropout", "tokens_per_batch", "tokenizer_v2",
                "use_auth", "label_key", "sort_key", "forward_pass", "turkey", "compass"]  # fmt: skip
    assert [n for n in harmless if job_fingerprint.looks_secret(n)] == []


@pytest.mark.parametrize("platform", ["docker", "vertex", "kubernetes", "slurm"])
@pytest.mark.parametrize(("options", "program"), [
    (["--label=token=ghp_HUSH"], []), (["--label", "password=HUSH"], []),
    (["--name=sk-HUSH0123456789abcd"], []),
    (["--api_key=HUSH"], []), (["--nonsense=HUSH"], []), (["--env=A=HUSH\nB"], []),
    (["--env=HF_TOKEN=HUSH\nB"], []), ([], ["--wandb_key=HUSH"]), ([], ["--a=xoxb-HUSH-0123456789"]),
    ([], ["--a=eyJHUSH0123.eyJHUSH0123.HUSH0123"]), ([], ["--bearer", "HUSH"]),
    (["--env=A=DefaultEndpointsProtocol=https;AccountKey=HUSH"], []), (["--env=TOKEN_V2=HUSH"], []),
])  # fmt: skip
def test_a_secret_is_refused_wherever_it_stands_and_is_not_repeated(platform, options, program, capsys):
    image = [] if platform in ("docker", "slurm") else [IMAGE]
    line = ["deploy", platform, *image, *options, "--", "python", "-m", "t", *program]
    assert cli.main(line) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "HUSH" not in captured.err


@pytest.mark.parametrize("line", [
    ["vertex", IMAGE, "--workers=2", "--evaluator"],
    *(["kubernetes", IMAGE, "--workers=2", "--evaluator", f"--flavor={flavor}"]
      for flavor in ("job", "tfjob", "trainjob")),
])  # fmt: skip
def test_without_a_program_the_entrypoint_of_the_image_runs_with_a_warning(line, capsys):
    text = manifest(line)
    assert "command:" not in text and "args:" not in text
    assert shlex.split(text.splitlines()[0])[3:] == line
    assert cli.main(["deploy", *line]) == 0
    assert "the ENTRYPOINT and CMD of the image are used" in capsys.readouterr().err
    flags_only = manifest([*line, "--", "--model_dir=gs://my-bucket/run"])
    assert "args:" in flags_only and "command:" not in flags_only


@pytest.mark.parametrize("line", [
    ["vertex", IMAGE, "--accelerator=NVIDIA_TESLA_V100:1"], ["kubernetes", IMAGE, "--gpus=1"],
])  # fmt: skip
def test_a_job_with_gpus_says_what_the_image_needs(line, capsys):
    program = ["--", "python", "-m", "trainer.task"]
    assert cli.main(["deploy", *line, *program]) == 0
    assert "ctl deploy docker --gpu" in capsys.readouterr().err
    assert cli.main(["deploy", *line[:2], *program]) == 0
    assert "ctl deploy docker --gpu" not in capsys.readouterr().err


@pytest.mark.parametrize("platform", ["docker", "slurm"])
def test_where_there_is_no_image_a_program_is_needed(platform, tmp_path, capsys):
    assert cli.main(["deploy", platform, f"--output={tmp_path / 'out'}"]) == 2
    assert "no program was given after `--`" in capsys.readouterr().err


def test_without_pyyaml_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    manifests._yaml_dumper.cache_clear()
    with pytest.raises(UsageError, match=r"tf-ctl\[deploy\]"):
        manifests.as_yaml([{"a": 1}])


@pytest.fixture
def template(tmp_path, monkeypatch):
    """Writes a template; returns its name."""
    monkeypatch.setattr(manifests, "_TEMPLATES", tmp_path)

    def write(text):
        (tmp_path / "a.yaml").write_text(text)
        return "a.yaml"

    return write


@given(WORDS | st.text("<>ab:#'\"\n-{}[]&*!|%@` ,", max_size=20))
@settings(max_examples=60, deadline=None)
def test_no_value_changes_the_structure_of_a_document(value):
    values = {"machine_type": value, "image": value, "replicas": 1, "command": [value], "env": None}
    values |= dict.fromkeys(("accelerator", "accelerator_count", "disk_gb", "args"))
    pool = manifests.fill_document("vertex_worker_pool.yaml", values)
    assert pool == {
        "machineSpec": {"machineType": value}, "replicaCount": 1,
        "containerSpec": {"imageUri": value, "command": [value]},
    }  # fmt: skip
    assert yaml.safe_load(manifests.as_yaml([pool])) == pool


def test_none_and_containers_of_none_are_omitted(template):
    name = template("a: {b: {c: <x>}, d: [<x>, {e: <x>}]}\nf: []\ng: <y>-<y>\n")
    assert manifests.fill_documents(name, {"x": None, "y": 1}) == [{"f": [], "g": "1-1"}]
    assert manifests.fill_documents(name, {"x": 0, "y": 1})[0]["a"] == {"b": {"c": 0}, "d": [0, {"e": 0}]}


@pytest.mark.parametrize(("outer", "inner", "expected"), [
    (True, True, "abd"), (True, False, "acd"), (False, True, "de"), (False, False, "de"),
])  # fmt: skip
def test_blocks_of_a_template_follow_their_conditions(template, outer, inner, expected):
    name = template("#if outer\na\n  #if inner\nb\n  #else\nc\n  #end\nd\n#else\nd\ne\n#end\n")
    assert manifests.fill_text(name, {"outer": outer, "inner": inner}).replace("\n", "") == expected


def test_a_value_that_is_not_known_is_an_error(template):
    for text in ("a: <x>\n", "#if x\n#end\n"):
        with pytest.raises(KeyError, match="x"):
            manifests.fill_documents(template(text), {})


def test_a_line_of_text_without_its_value_is_left_out_and_values_are_not_read_again(template):
    name = template("<a>\n<b> and <a>\nend\n")
    assert manifests.fill_text(name, {"a": "<b>", "b": None}) == "<b>\nend\n"


def test_a_wheel_contains_the_templates():
    names = {path.name for path in manifests._TEMPLATES.iterdir()}
    assert {"Dockerfile", "job.sbatch", "kubernetes_job.yaml", "vertex_custom_job.yaml"} <= names
    assert '"ctl.deploy" = ["templates/*"]' in (ROOT / "pyproject.toml").read_text()
