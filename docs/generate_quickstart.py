"""Runs docs/quickstart.ipynb and keeps what its cells show.

python docs/generate_quickstart.py
"""

import os
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("quickstart.ipynb")
TIMEOUT_SECS = 300


def executed(folder: str) -> nbformat.NotebookNode:
    """The notebook after all cells have run in a folder. Raises CellExecutionError."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=TIMEOUT_SECS, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of its messages
        for output in cell.get("outputs", ()):
            if "text" in output:
                output.text = re.sub(r"\S+/bin/tensorboard", "tensorboard", output.text)
    return notebook


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(NOTEBOOK.parents[1])
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(folder), NOTEBOOK)
