"""Execution of docs/quickstart.ipynb in Jupyter, compared with the stored outputs."""

import sys

import nbformat
import pytest
from conftest import ROOT, environment

sys.path.insert(0, str(ROOT / "docs"))
import generate_quickstart

pytestmark = pytest.mark.workers  # Jupyter's kernel is a process


def outputs_of(notebook):
    """Returns the output types and the output text of each cell."""
    types_by_cell, texts = [], []
    for cell in notebook.cells:
        outputs = cell.get("outputs", ())
        types_by_cell.append(
            {output_type for o in outputs for output_type in o.get("data", {o.output_type: 0})}
        )
        texts.append("".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs))
    return types_by_cell, texts


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        return generate_quickstart.executed(str(tmp_path_factory.mktemp("notebook")))


def test_the_notebook_runs_and_its_outputs_have_the_stored_types(executed):
    stored = nbformat.read(generate_quickstart.NOTEBOOK, as_version=4)
    assert [c.source for c in stored.cells] == [c.source for c in executed.cells]
    assert outputs_of(executed)[0] == outputs_of(stored)[0]
    stderr = [o.text for c in executed.cells for o in c.get("outputs", ()) if o.get("name") == "stderr"]
    assert stderr == []


def test_header_bar_and_summary_are_printed_and_the_second_training_resumes(executed):
    first, second = [text for text in outputs_of(executed)[1] if "done at step" in text]
    for part in ("strategy    default", "300/300", "eval step 300", "eval accuracy", "speed"):
        assert part in first
    assert "resuming at step 300" in second and "600/600" in second
    assert "\x1b" not in first


def test_curves_are_pictures_and_mistakes_are_exceptions(executed):
    types_by_cell, texts = outputs_of(executed)
    assert sum("image/png" in output_types for output_types in types_by_cell) == 2
    assert sum("Write log_every_steps=..." in text for text in texts) == 1
    assert texts[-2] == "True"  # the exported model predicts the same


def test_the_stored_outputs_contain_no_path_of_a_machine():
    text = generate_quickstart.NOTEBOOK.read_text()
    assert "site-packages" not in text and "/tmp/" not in text and str(ROOT) not in text
