"""There is a complete checkpoint at every moment, on disks and in object stores; damaged ones are kept."""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

import ctl
import pytest
from ctl.checkpoints import checksums, commit
from ctl.checkpoints.retention import Keep
from ctl.io import paths

URL = "ram://tests"


class Died(BaseException):
    """The process is gone: nothing that comes after it in the product's code may tidy up."""


def manifest(step, **more):
    return ctl.Manifest(step=step, created=float(step), **more)


def writer(text="x" * 64):
    def write_state(prefix):
        for end in (".data-00000-of-00001", ".index"):
            paths.path(prefix + end).write_bytes(text.encode())

    return write_state


def good(directory):
    """Steps of the checkpoints that are listed, all of which must be whole."""
    found = commit.list_checkpoints(directory)
    assert [commit.find_damage(path, m) for path, m in found] == [None] * len(found)
    return [m.step for _, m in found]


def names(directory):
    return sorted(p.name for p in directory.iterdir() if p.name != commit.LISTING)


@pytest.fixture(params=["disk", "mounted", "url"])
def place(request, tmp_path, monkeypatch):
    """A directory on a disk, in an object store that is mounted, or at a URL."""
    if request.param == "url":
        yield paths.path(f"{URL}/{tmp_path.name}") / "c"
        return
    if request.param == "mounted":
        monkeypatch.setenv(paths.STORES, str(tmp_path))
        monkeypatch.setattr(Path, "rename", lambda *_: pytest.fail("renamed"))
        monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("renamed"))
    assert paths.has_rename(tmp_path) == (request.param == "disk")
    (tmp_path / "run").mkdir()
    yield tmp_path / "run" / "c"


class Moments:
    """Calls `look` before each thing that is done to files, and dies at the n-th of them."""

    def __init__(self, monkeypatch, look, die_at=None):
        self.count = 0
        targets = [(Path, n) for n in ("rename", "unlink", "mkdir", "write_bytes")]
        targets += [(paths.UrlPath, n) for n in ("unlink", "mkdir", "write_bytes")]
        for owner, name in (*targets, (paths, "remove_tree"), (paths, "sync"), (shutil, "rmtree")):
            original = getattr(owner, name)

            def watched(*arguments, _original=original, **options):
                self.count += 1
                look()
                if die_at is not None and self.count >= die_at:
                    raise Died
                return _original(*arguments, **options)

            monkeypatch.setattr(owner, name, watched)


def test_keeping_one_never_leaves_a_moment_with_none(place, monkeypatch):
    manager = ctl.ChiefOnlyCheckpoints(str(place), keep=Keep(newest=1))
    commit.write_checkpoint(place, manifest(1), writer())
    seen = []
    moments = Moments(monkeypatch, lambda: seen.append(good(place)))
    for step in (2, 2, 3):  # the same step twice: replaced
        commit.write_checkpoint(place, manifest(step, metrics={"n": len(seen)}), writer(str(step) * 99))
        manager._delete_surplus()
    assert moments.count > 15 and all(seen)
    assert good(place) == [3] and names(place) == ["ckpt-3"]


def test_a_process_that_dies_anywhere_leaves_a_whole_checkpoint(place, monkeypatch):
    """Dies at the first thing done to a file, then at the second, and so on until it gets through."""
    for number in range(1, 200):
        with monkeypatch.context() as patch:
            shutil.rmtree(place) if isinstance(place, Path) and place.exists() else None
            for path, _ in commit.list_checkpoints(place):
                commit.discard_directory(path)
            commit.write_checkpoint(place, manifest(1), writer())
            Moments(patch, lambda: None, die_at=number)
            patch.setattr(commit, "discard_directory", dying(commit.discard_directory))
            try:
                for step in (1, 2):
                    commit.write_checkpoint(place, manifest(step, metrics={"new": 1.0}), writer("y" * 70))
                    for path, m in commit.list_checkpoints(place):
                        if m.step < step:
                            commit.remove_checkpoint(path)
                through = True
            except Died:
                through = False
        found = good(place)
        assert found in ([1], [1, 2], [2]), number
        commit.delete_leftovers(place)
        assert good(place) == found
        assert set(names(place)) == {f"ckpt-{step}" for step in found}, number
        if through:
            return
    pytest.fail("it never got through")


def dying(discard):
    """A dead process does not clean up either."""
    import sys

    def wrapped(path, ignore_errors=True):
        if not isinstance(sys.exc_info()[1], Died):
            discard(path, ignore_errors)

    return wrapped


def test_in_an_object_store_a_directory_without_its_marker_is_never_listed(place, monkeypatch):
    commit.write_checkpoint(place, manifest(1), writer())
    with monkeypatch.context() as patch:
        patch.setattr(commit, "write_manifest", lambda *_: (_ for _ in ()).throw(Died))
        patch.setattr(commit, "discard_directory", dying(commit.discard_directory))
        with pytest.raises(Died):
            commit.write_checkpoint(place, manifest(2), writer())
    assert good(place) == [1]
    in_place = not paths.has_rename(place)
    assert ("ckpt-2" in names(place)) == in_place
    assert commit.survey_checkpoints(place)[1] == {}  # never complete, so not damaged
    assert len(commit.delete_leftovers(place)) == 1 and names(place) == ["ckpt-1"]


def test_deleting_in_an_object_store_takes_the_marker_first(place, monkeypatch):
    commit.write_checkpoint(place, manifest(1), writer())
    seen = []
    monkeypatch.setattr(paths, "remove_tree", lambda path: seen.append(good(place)))
    commit.remove_checkpoint(place / "ckpt-1")
    assert seen == [[]]


def test_a_damaged_one_is_set_aside_under_a_name_that_is_free(place):
    for number in range(3):
        commit.write_checkpoint(place, manifest(7), writer(str(number) * 9))
        commit.move_to_damaged(place / "ckpt-7")
        assert good(place) == []
    aside = place / commit.DAMAGED
    assert names(aside) == ["ckpt-7", "ckpt-7-1", "ckpt-7-2"]
    data = [(aside / n / "state.index").read_bytes() for n in names(aside)]
    assert data == [str(number).encode() * 9 for number in range(3)]


def test_checksums_of_earlier_checkpoints_are_still_compared(place):
    commit.write_checkpoint(place, manifest(3), writer("abc"))
    path = place / "ckpt-3" / commit.MANIFEST
    content = json.loads(path.read_bytes())
    assert content["files"]["state.index"] == {"size": 3, "checksum": "crc32c:364b3fb7"}
    assert content.pop("checksum").startswith("crc32c:")
    for entry in content["files"].values():
        entry["checksum"] = f"sha256:{hashlib.sha256(b'abc').hexdigest()}"
    text = json.dumps(content, sort_keys=True)
    content["checksum"] = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    path.unlink()
    path.write_bytes(json.dumps(content).encode())
    assert good(place) == [3]
    (place / "ckpt-3" / "state.index").unlink()
    (place / "ckpt-3" / "state.index").write_bytes(b"abd")
    [(found, read)] = commit.list_checkpoints(place)
    assert "does not have the checksum" in commit.find_damage(found, read)
    with pytest.raises(ValueError, match="unknown checksum algorithm 'md5'"):
        checksums.compute_checksum([b""], "md5:0")


def test_a_failing_delete_is_a_warning(place, monkeypatch, caplog):
    for step in (1, 2, 3):
        commit.write_checkpoint(place, manifest(step), writer())
    manager = ctl.ChiefOnlyCheckpoints(str(place), keep=Keep(newest=1))

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(commit, "remove_checkpoint", refuse)
    manager._delete_surplus()
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 2 and "Cannot delete the old checkpoint" in said[0]
    assert good(place) == [1, 2, 3]


def test_what_another_job_has_taken_over_is_left_as_it_is(place):
    commit.write_checkpoint(place, manifest(4), writer("theirs"))
    manager = ctl.ChiefOnlyCheckpoints(str(place))

    def lost():
        raise ctl.errors.LeaseLostError("taken over")

    def swept(prefix):  # what the other one finds when it begins
        raise FileNotFoundError(prefix)

    manager.fence(lost)
    for act in (
        lambda: manager._commit(manifest(4), writer("mine"), 0),
        lambda: manager._commit(manifest(5), writer("mine"), 0),
        lambda: manager._commit(manifest(5), swept, 0),
        lambda: manager.amend(4, {"loss": 1.0}, {}),
    ):
        with pytest.raises(ctl.errors.LeaseLostError):
            act()
    assert good(place) == [4] and names(place) == ["ckpt-4"]
    assert (place / "ckpt-4" / "state.index").read_bytes() == b"theirs"
    assert not commit.read_manifest(place / "ckpt-4").metrics


def test_two_jobs_that_save_one_step_do_not_break_each_other_s_saves(tmp_path):
    first, second = (ctl.ChiefOnlyCheckpoints(tmp_path / "c") for _ in range(2))

    def meanwhile(prefix):
        writer("first")(prefix)
        second._commit(manifest(2), writer("second"), 0)

    first._commit(manifest(2), meanwhile, 0)
    assert good(tmp_path / "c") == [2] and names(tmp_path / "c") == ["ckpt-2"]
    assert (tmp_path / "c" / "ckpt-2" / "state.index").read_bytes() == b"first"


def test_a_url_is_no_local_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = paths.path("ram://tests-names/a") / "b"
    assert (str(path), path.name, str(path.parent)) == (
        "ram://tests-names/a/b", "b", "ram://tests-names/a"
    )  # fmt: skip
    for action in (path.read_bytes, path.unlink, path.stat, lambda: list(path.iterdir())):
        with pytest.raises(FileNotFoundError):
            action()
    path.unlink(missing_ok=True)
    assert not path.exists() and not path.is_file() and paths.free_bytes(path) is None
    assert list(tmp_path.iterdir()) == []
    assert paths.free_bytes(tmp_path / "not" / "there") > 0
    assert paths.has_rename(tmp_path) and not paths.has_rename(path)
    assert not paths.has_rename(paths.path("/gcs/bucket/run"))


def test_every_k_th_stays_for_good(place):
    manager = ctl.ChiefOnlyCheckpoints(str(place), keep=Keep.parse("1,best=loss,every=4"))
    for step in range(1, 11):
        loss = float("nan") if step == 10 else abs(step - 3.0)
        commit.write_checkpoint(place, manifest(step, metrics={"loss": loss}), writer())
        manager._delete_surplus()
    assert manager.steps() == [3, 4, 8, 10]
    again = ctl.ChiefOnlyCheckpoints(str(place), keep=manager.keep)  # as after a restart
    commit.write_checkpoint(place, manifest(11, metrics={"loss": 0.5}), writer())
    again._delete_surplus()
    assert again.steps() == [3, 4, 8, 11]
