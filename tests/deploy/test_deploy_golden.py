"""Manifests are identical to golden/, and to the manifests of the command in their first line.

After an intended change: `python tests/deploy/regenerate.py`, and read `git diff tests/deploy/golden`.
"""

import json
import shlex

import pytest
import yaml
from golden_cases import CASES
from regenerate import GOLDEN, manifest


@pytest.mark.parametrize("name", CASES)
def test_a_manifest_is_as_it_was(name):
    golden_text = (GOLDEN / name).read_text(encoding="utf-8")
    assert manifest(CASES[name]) == golden_text, "meant? python tests/deploy/regenerate.py"


@pytest.mark.parametrize("name", [n for n in CASES if not n.endswith(".json")])
def test_the_first_comment_of_a_manifest_writes_it_again(name):
    text = (GOLDEN / name).read_text(encoding="utf-8")
    arguments = shlex.split(next(line for line in text.splitlines() if line.startswith("# "))[2:])
    assert arguments[:2] == ["ctl", "deploy"] and manifest(arguments[2:]) == text


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("kubernetes") and n.endswith("json")])
def test_an_annotation_of_a_json_manifest_writes_it_again(name):
    text = (GOLDEN / name).read_text(encoding="utf-8")
    [line] = [line for d in json.loads(text)["items"] for line in _lines(d)]
    assert manifest(shlex.split(line)[2:]) == text


def _lines(document):
    """Removes the annotation of a document and returns its lines."""
    annotations = document["metadata"].pop("annotations", {})
    return [annotations["ctl/command-line"]] if annotations else []


@pytest.mark.parametrize("name", [n for n in CASES if n.endswith(".yaml")])
def test_yaml_and_json_have_the_same_content(name):
    arguments = CASES[name]
    at = arguments.index("--")
    json_manifest = json.loads(manifest([*arguments[:at], "--format=json", *arguments[at:]]))
    documents = list(yaml.safe_load_all((GOLDEN / name).read_text(encoding="utf-8")))
    if json_manifest.get("kind") != "List":
        assert [json_manifest] == documents
        return
    [line] = [line for d in json_manifest["items"] for line in _lines(d)]
    assert shlex.split(line)[2:] == [*arguments[:at], "--format=json", *arguments[at:]]
    assert json_manifest["items"] == documents


def test_there_is_no_golden_file_without_a_line():
    assert {path.name for path in GOLDEN.iterdir()} == set(CASES)
