"""Promises 14 and 18: kill -9 at any point of a save costs at most one interval, and never all."""

import pytest
from conftest import some_of
from saving_faults import PLACES
from saving_jobs import checkpoints, jobs, names, unbroken  # noqa: F401

pytestmark = pytest.mark.workers
IN_A_RUN = [p for p in PLACES if p not in ("while_replacing", "after_step")]


@pytest.mark.parametrize("how", ["at once", pytest.param("in the background", marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", IN_A_RUN)
def test_a_save_killed_at_any_point_costs_at_most_one_interval(
    jobs, unbroken, tmp_path, place, how  # noqa: F811
):  # fmt: skip
    arguments = ["--keep=1", *(["--background"] if how != "at once" else [])]
    assert jobs(tmp_path, *arguments, faults=f"kill:{place}@4").code == -9
    before = checkpoints(tmp_path)
    assert before and set(before) <= {2, 4}
    assert (4 in before) == (place in ("before_deleting", "while_deleting"))
    done = jobs(tmp_path, *arguments)
    assert done.code == 0 and done.json["began"] == before[-1], done.output
    assert done.json["final"] == unbroken
    assert names(tmp_path / "checkpoints") == ["ckpt-8"]


@pytest.mark.parametrize(
    "place", some_of(["while_replacing", "before_commit", "mid_data"], "while_replacing", "before_commit")
)
def test_a_step_that_is_saved_again_is_there_at_every_moment(
    jobs, unbroken, tmp_path, place  # noqa: F811
):  # fmt: skip
    assert jobs(tmp_path, "--keep=1").code == 0
    done = jobs(tmp_path, "--keep=1", "--twice", faults=f"kill:{place}@8")
    assert done.code == -9
    assert checkpoints(tmp_path) == [8]
    done = jobs(tmp_path, "--keep=1")
    assert done.json["began"] == 8 and done.json["final"] == unbroken
    assert names(tmp_path / "checkpoints") == ["ckpt-8"]


WITHOUT_RENAMING = ("mid_data", "before_index", "before_manifest", "before_commit")


@pytest.mark.parametrize("place", some_of(WITHOUT_RENAMING, "before_manifest", "before_commit"))
def test_in_an_object_store_what_has_no_marker_is_not_listed(
    jobs, unbroken, tmp_path, place  # noqa: F811
):  # fmt: skip
    """Promise 27: without renaming anything."""
    assert jobs(tmp_path, "--mounted", "--keep=1", faults=f"kill:{place}@4").code == -9
    marked = place == "before_commit"  # here the marker is the commit
    assert checkpoints(tmp_path) == ([2, 4] if marked else [2])
    assert ("ckpt-4" in names(tmp_path / "checkpoints")) and "tmp-ckpt-4" not in names(
        tmp_path / "checkpoints"
    )
    done = jobs(tmp_path, "--mounted", "--keep=1")
    assert done.json["began"] == (4 if marked else 2) and done.json["final"] == unbroken
    assert names(tmp_path / "checkpoints") == ["ckpt-8"]
