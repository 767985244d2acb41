"""docs/quickstart.ipynb runs in Jupyter as it is, and shows what the kept outputs show."""

import sys

import nbformat
import pytest
from conftest import ROOT, environment

sys.path.insert(0, str(ROOT / "docs"))
import generate_quickstart

pytestmark = pytest.mark.workers  # Jupyter's kernel is a process


def shown(notebook):
    """For each cell of code the kinds of what it shows, and all text together."""
    kinds, texts = [], []
    for cell in notebook.cells:
        outputs = cell.get("outputs", ())
        kinds.append({kind for o in outputs for kind in o.get("data", {o.output_type: 0})})
        texts.append("".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs))
    return kinds, texts


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        return generate_quickstart.executed(str(tmp_path_factory.mktemp("notebook")))


def test_it_runs_and_shows_what_is_kept(executed):
    kept = nbformat.read(generate_quickstart.NOTEBOOK, as_version=4)
    assert [c.source for c in kept.cells] == [c.source for c in executed.cells]
    assert shown(executed)[0] == shown(kept)[0]
    stderr = [o.text for c in executed.cells for o in c.get("outputs", ()) if o.get("name") == "stderr"]
    assert stderr == []


def test_header_bar_and_summary_are_there_and_the_second_training_resumes(executed):
    first, second = [text for text in shown(executed)[1] if "done at step" in text]
    for part in ("strategy    default", "300/300", "eval step 300", "eval accuracy", "speed"):
        assert part in first
    assert "resuming at step 300" in second and "600/600" in second
    assert "\x1b" not in first


def test_curves_are_pictures_and_mistakes_are_exceptions(executed):
    kinds, texts = shown(executed)
    assert sum("image/png" in found for found in kinds) == 2
    assert sum("Write log_every_steps=..." in text for text in texts) == 1
    assert texts[-2] == "True"  # the exported model predicts the same


def test_what_is_kept_names_no_path_of_a_machine():
    text = generate_quickstart.NOTEBOOK.read_text()
    assert "site-packages" not in text and "/tmp/" not in text and str(ROOT) not in text
