"""Runs every strategy, framework and optimizer and writes the results into docs/strategies.md.

    python docs/generate_strategies.py

It takes about two minutes. tests/distribute/test_strategy_matrix.py runs the rows again and compares.
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("strategies.md")
BEGIN = "<!-- measured: written by docs/generate_strategies.py -->"
END = "<!-- end of the measured list -->"
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "programs")]


def main() -> None:
    import matrix

    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "programs")])
    environment = {**os.environ, "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as directory:
        cells = {}
        for i, row in enumerate(matrix.ROWS):
            cells[row] = matrix.run_row(row, Path(directory) / str(i), environment)
            print(row, *cells[row], sep="  ")
    text = PAGE.read_text(encoding="utf-8")
    before, remainder = text.split(BEGIN)
    after = remainder.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{matrix.table(cells)}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
