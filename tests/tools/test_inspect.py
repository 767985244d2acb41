"""`ctl inspect`: report of a model_dir without changes."""

import json
import shutil
import subprocess
import sys

import ctl
import pytest
from conftest import TIMEOUT_SECS, environment
from ctl import cli
from ctl.tools import inspect as inspect_command
from small_models import Small, every_step
from test_checkpoints import DAMAGES


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inspected") / "run"
    intervals = every_step(save=ctl.Every(steps=2), evaluate=ctl.Every(steps=2))
    options = dict(optimizer="adam", strategy="default", writers=[], intervals=intervals)
    Small(model_dir=str(directory), **options).train(6)
    return directory


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def run_inspect(capsys, *arguments):
    code = cli.main(["inspect", *map(str, arguments)])
    return code, capsys.readouterr()


def test_the_table_is_aligned_and_complete(run, capsys):
    (run / "checkpoints" / "tmp-ckpt-7").mkdir()
    before = sorted(run.rglob("*"))
    code, printed = run_inspect(capsys, run, "--best=loss")
    lines = printed.out.splitlines()
    assert code == 0 and lines[0] == str(run / "checkpoints")
    assert lines[1].split() == ["step", "saved", "size", "files", "verified", "best", "metrics"]
    rows = [line.split() for line in lines[2:5]]
    assert [row[0] for row in rows] == ["2", "4", "6"]
    assert all("not checked" in line and "loss=" in line for line in lines[2:5])
    assert len({line.index("not checked") for line in lines[2:5]} | {lines[1].index("verified")}) == 1
    assert [("*" in line) for line in lines[2:5]] == [False, False, True]
    assert lines[5] == "incomplete: tmp-ckpt-7"
    assert lines[6].startswith("LOCK: ") and lines[6].endswith("done, step 6")
    assert len(lines) == 7 and sorted(run.rglob("*")) == before


def test_the_json_is_one_object(run, capsys):
    code, printed = run_inspect(capsys, run, "--json", "--verify", "--variables")
    report = json.loads(printed.out)
    assert code == 0
    assert [c["step"] for c in report["checkpoints"]] == [2, 4, 6]
    assert {c["verified"] for c in report["checkpoints"]} == {"ok"}
    newest = report["checkpoints"][-1]
    assert newest["files"] == ["state.data-00000-of-00001", "state.index"]
    assert newest["bytes"] == sum(
        (run / "checkpoints" / "ckpt-6" / n).stat().st_size for n in newest["files"]
    )
    assert report["variables"]["model/sequential/dense/kernel"] == {
        "dtype": "float32", "shape": [8, 16]
    }  # fmt: skip
    assert report["lock"]["state"] == "ended" and report["lock"]["alive"] is False
    assert "model/sequential/dense/kernel" in run_inspect(capsys, run, "--variables")[1].out
    assert "variables" not in json.loads(run_inspect(capsys, run, "--json")[1].out)


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_is_detected_with_verify(run, capsys, damage):
    DAMAGES[damage](run / "checkpoints" / "ckpt-4")
    assert run_inspect(capsys, run)[0] == 0
    code, printed = run_inspect(capsys, run / "checkpoints", "--verify")
    assert code == 1
    [line] = [line for line in printed.out.splitlines() if line.split()[0] == "4"]
    assert " ok" not in line and any(w in line for w in ("state.", "manifest", "missing"))
    assert sum(" ok" in line for line in printed.out.splitlines()) == 2


def test_damaged_checkpoints_are_named(run, capsys):
    DAMAGES["truncated"](run / "checkpoints" / "ckpt-6")
    options = dict(optimizer="adam", strategy="default", writers=[], intervals=every_step())
    Small(model_dir=str(run), **options).train(6)
    code, printed = run_inspect(capsys, run, "--verify")
    assert code == 0 and "damaged: ckpt-6" in printed.out


def test_a_path_that_is_no_model_dir_is_refused(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "not", "ram://nothing/here"):
        code, printed = run_inspect(capsys, path)
        assert code == 2 and "is not a model_dir; expected" in printed.err and printed.out == ""
    with pytest.raises(SystemExit) as raised:
        run_inspect(capsys)
    assert raised.value.code == 2


def test_numbers_that_are_not_finite_are_json(run):
    report = inspect_command.inspect_run(run / "checkpoints")
    report["checkpoints"][0]["metrics"] = {"loss": inspect_command._to_json_number(float("nan"))}
    assert "NaN" not in json.dumps(report) and "loss=nan" in inspect_command.inspection_text(report, 0.0)


def test_inspection_of_local_files_does_not_import_tensorflow(run):
    code = (
        "import sys; from ctl import cli; assert cli.main(sys.argv[1:]) == 0; "
        "assert 'tensorflow' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(run), "--verify"], env=environment(),
        timeout=TIMEOUT_SECS, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
