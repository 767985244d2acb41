"""Files of interrupted writes in a checkpoint directory, and directory names with pattern characters."""

from pathlib import Path

import ctl
import pytest
from ctl.checkpoints import commit, tensor_files
from ctl.io import paths


@pytest.mark.parametrize("scheme", ["disk", "url"])
def test_a_checkpoint_contains_no_file_of_an_interrupted_save(tmp_path, scheme):
    directory = paths.path(f"ram://stale/{tmp_path.name}") if scheme == "url" else tmp_path
    stale = directory / "ckpt-3"
    stale.mkdir(parents=True, exist_ok=True)
    (stale / "state.data-00001-of-00002").write_bytes(b"half")

    def write_state(prefix):
        paths.path(prefix + ".index").write_bytes(b"complete")

    checkpoint_path = commit.write_checkpoint(directory, ctl.Manifest(step=3, created=1.0), write_state)
    assert sorted(p.name for p in checkpoint_path.iterdir()) == ["manifest.json", "state.index"]


def test_a_directory_with_pattern_characters_has_an_alias_also_without_proc(tmp_path, monkeypatch):
    directory = tmp_path / "lr[1]"
    directory.mkdir()
    (directory / "state.index").write_text("here")
    exists = Path.exists
    is_hidden = lambda path: str(path).startswith("/proc/")  # noqa: E731
    monkeypatch.setattr(Path, "exists", lambda self: not is_hidden(self) and exists(self))
    with tensor_files.state_prefix(directory) as prefix:
        assert "[" not in prefix and Path(f"{prefix}.index").read_text() == "here"


def test_a_checkpoint_is_deleted_although_an_earlier_deletion_of_its_step_was_interrupted(tmp_path):
    for name in ("ckpt-3", "deleted-ckpt-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.index").write_text("here")
    commit.remove_checkpoint(tmp_path / "ckpt-3")
    assert not list(tmp_path.iterdir())
