"""The environment variable that turns off patches, and the descriptions of the patches."""

import ast
import re

import pytest
from conftest import ROOT
from ctl.distribute import job_fingerprint
from ctl.errors import UsageError
from ctl.tensorflow_patches import switches

FOLDER = ROOT / "ctl" / "tensorflow_patches"
MODULES = sorted(p for p in FOLDER.glob("*.py") if p.stem not in ("__init__", "switches"))
FIELDS = r"^Purpose: .+?^(Replaces|Uses): .+?^Versions: .+?^Upstream issue: .+?^Switch: (.+?)\Z"


def switches_read_by(tree):
    """Returns the names that a module passes to `is_enabled`."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return {c.args[0].value for c in calls if ast.unparse(c.func) == "switches.is_enabled"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_describes_its_patch_and_reads_the_switch_of_its_name(path):
    tree = ast.parse(path.read_text())
    fields = re.search(FIELDS, ast.get_docstring(tree), re.MULTILINE | re.DOTALL)
    assert fields is not None
    named = re.match(r"`(\w+)`", fields[2])
    names = {named[1]} if named else set()
    assert names in (set(), {path.stem})
    assert switches_read_by(tree) == names
    assert bool(names) or fields[2].startswith("none")


def test_the_switches_are_those_that_modules_read():
    names = set.union(*(switches_read_by(ast.parse(path.read_text())) for path in MODULES))
    assert names == switches.PATCHES


def test_every_patch_is_enabled_by_default(monkeypatch):
    monkeypatch.delenv(switches.VARIABLE, raising=False)
    assert all(map(switches.is_enabled, switches.PATCHES))


def test_the_variable_turns_off_several_patches_and_each_is_logged_once(monkeypatch, caplog):
    switches._log_disabled.cache_clear()
    monkeypatch.setenv(switches.VARIABLE, " weighted_means,random_in_xla, ")
    enabled = {name for name in switches.PATCHES for _ in range(2) if switches.is_enabled(name)}
    assert switches.PATCHES - enabled == {"weighted_means", "random_in_xla"}
    assert len(caplog.messages) == 2
    assert all(switches.VARIABLE in message for message in caplog.messages)


def test_an_unknown_name_is_an_error(monkeypatch):
    monkeypatch.setenv(switches.VARIABLE, "weighted_mean")
    with pytest.raises(UsageError, match="contains weighted_mean; expected names of .*weighted_means"):
        switches.is_enabled("random_in_xla")


def test_workers_compare_the_patches_that_are_turned_off(monkeypatch):
    monkeypatch.delenv(switches.VARIABLE, raising=False)
    before = job_fingerprint.fingerprint_of_process(0, {})
    monkeypatch.setenv(switches.VARIABLE, "weighted_means, random_in_xla")
    after = job_fingerprint.fingerprint_of_process(0, {})
    assert after == {**before, switches.VARIABLE: "random_in_xla,weighted_means"}
    assert switches.VARIABLE not in before


def test_the_page_of_the_documentation_lists_every_patch_and_its_switch():
    text = (ROOT / "docs" / "tensorflow_patches.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (yes|no) \|", text, re.MULTILINE)
    assert len(rows) == len({name for name, _ in rows})
    assert {name for name, _ in rows} == {path.stem for path in MODULES}
    assert {name for name, has_switch in rows if has_switch == "yes"} == switches.PATCHES
