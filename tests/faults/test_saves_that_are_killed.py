"""Promises 14 and 18: kill -9 at any point of a save costs at most one interval, and never all."""

import pytest
from conftest import some_of
from saving_faults import PLACES
from saving_jobs import checkpoints, jobs, names, unbroken  # noqa: F401

pytestmark = pytest.mark.workers
IN_A_RUN = [p for p in PLACES if p not in ("while_replacing", "after_step")]


@pytest.mark.parametrize("mode", ["at once", pytest.param("in the background", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault_position", IN_A_RUN)
def test_a_save_killed_at_any_point_costs_at_most_one_interval(
    jobs, unbroken, tmp_path, fault_position, mode  # noqa: F811
):  # fmt: skip
    arguments = ["--keep=1", *(["--background"] if mode != "at once" else [])]
    assert jobs(tmp_path, *arguments, faults=f"kill:{fault_position}@4").code == -9
    before = checkpoints(tmp_path)
    assert before and set(before) <= {2, 4}
    assert (4 in before) == (fault_position in ("before_deleting", "while_deleting"))
    result = jobs(tmp_path, *arguments)
    assert result.code == 0 and result.json["began"] == before[-1], result.output
    assert result.json["final"] == unbroken
    assert names(tmp_path / "checkpoints") == ["ckpt-8"]


@pytest.mark.parametrize(
    "fault_position",
    some_of(["while_replacing", "before_commit", "mid_data"], "while_replacing", "before_commit"),
)
def test_a_step_that_is_saved_again_exists_at_every_moment(
    jobs, unbroken, tmp_path, fault_position  # noqa: F811
):  # fmt: skip
    assert jobs(tmp_path, "--keep=1").code == 0
    result = jobs(tmp_path, "--keep=1", "--twice", faults=f"kill:{fault_position}@8")
    assert result.code == -9
    assert checkpoints(tmp_path) == [8]
    result = jobs(tmp_path, "--keep=1")
    assert result.json["began"] == 8 and result.json["final"] == unbroken
    assert names(tmp_path / "checkpoints") == ["ckpt-8"]


WITHOUT_RENAMING = ("mid_data", "before_index", "before_manifest", "before_commit")


@pytest.mark.parametrize("fault_position", some_of(WITHOUT_RENAMING, "before_manifest", "before_commit"))
def test_in_an_object_store_a_checkpoint_without_a_marker_is_not_listed(
    jobs, unbroken, tmp_path, fault_position  # noqa: F811
):  # fmt: skip
    """Promise 27: without renaming anything."""
    assert jobs(tmp_path, "--mounted", "--keep=1", faults=f"kill:{fault_position}@4").code == -9
    marked = fault_position == "before_commit"  # the marker is the commit
    assert checkpoints(tmp_path) == ([2, 4] if marked else [2])
    assert ("ckpt-4" in names(tmp_path / "checkpoints")) and "tmp-ckpt-4" not in names(
        tmp_path / "checkpoints"
    )
    result = jobs(tmp_path, "--mounted", "--keep=1")
    assert result.json["began"] == (4 if marked else 2) and result.json["final"] == unbroken
    assert names(tmp_path / "checkpoints") == ["ckpt-8"]
