"""Manifests are the same to the last byte as those in golden/, and as their own first line says.

After a change that is meant: `python tests/deploy/regenerate.py`, and read `git diff tests/deploy/golden`.
"""

import json
import shlex

import pytest
import yaml
from golden_cases import CASES
from regenerate import GOLDEN, manifest


@pytest.mark.parametrize("name", CASES)
def test_a_manifest_is_as_it_was(name):
    kept = (GOLDEN / name).read_text(encoding="utf-8")
    assert manifest(CASES[name]) == kept, "meant? python tests/deploy/regenerate.py"


@pytest.mark.parametrize("name", [n for n in CASES if not n.endswith(".json")])
def test_the_first_comment_of_a_manifest_writes_it_again(name):
    text = (GOLDEN / name).read_text(encoding="utf-8")
    words = shlex.split(next(line for line in text.splitlines() if line.startswith("# "))[2:])
    assert words[:2] == ["ctl", "deploy"] and manifest(words[2:]) == text


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("kubernetes") and n.endswith("json")])
def test_an_annotation_of_a_json_manifest_writes_it_again(name):
    text = (GOLDEN / name).read_text(encoding="utf-8")
    [line] = [line for d in json.loads(text)["items"] for line in _lines(d)]
    assert manifest(shlex.split(line)[2:]) == text


def _lines(document):
    """The annotation of a document, which is taken out."""
    kept = document["metadata"].pop("annotations", {})
    return [kept["ctl/command-line"]] if kept else []


@pytest.mark.parametrize("name", [n for n in CASES if n.endswith(".yaml")])
def test_yaml_and_json_say_the_same(name):
    words = CASES[name]
    at = words.index("--")
    found = json.loads(manifest([*words[:at], "--format=json", *words[at:]]))
    documents = list(yaml.safe_load_all((GOLDEN / name).read_text(encoding="utf-8")))
    if found.get("kind") != "List":
        assert [found] == documents
        return
    [line] = [line for d in found["items"] for line in _lines(d)]
    assert shlex.split(line)[2:] == [*words[:at], "--format=json", *words[at:]]
    assert found["items"] == documents


def test_there_is_no_golden_file_without_a_line():
    assert {path.name for path in GOLDEN.iterdir()} == set(CASES)
