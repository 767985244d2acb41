"""Regeneration of golden/: run `python tests/deploy/regenerate.py`, then review the difference."""

import contextlib
import io
from pathlib import Path

from ctl import cli
from golden_cases import CASES

GOLDEN = Path(__file__).parent / "golden"


def manifest(arguments: list[str]) -> str:
    """Returns the output of `ctl deploy` for these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["deploy", *arguments])
    assert code == 0, err.getvalue()
    return out.getvalue()


if __name__ == "__main__":
    for stale in GOLDEN.iterdir():
        stale.unlink()
    for name, arguments in CASES.items():
        (GOLDEN / name).write_text(manifest(arguments), encoding="utf-8")
