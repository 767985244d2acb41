"""Promises 16, 17, 20, 23: damaged checkpoints are passed over and kept, and never all of them."""

import shutil

import pytest
from conftest import some_of
from saving_jobs import checkpoints, jobs, names, truncate_data, unbroken  # noqa: F401

pytestmark = pytest.mark.workers


def flipped(path):
    data = next(path.glob("state.data*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))


# function that damages the directory, text of the warning
DAMAGES = {
    "truncated": (truncate_data, "state.data-00000-of-00001 has"),
    "a bit flipped": (flipped, "state.data-00000-of-00001 does not have the checksum"),
    "index missing": (lambda p: (p / "state.index").unlink(), "state.index is missing"),
    "index empty": (lambda p: (p / "state.index").write_bytes(b""), "state.index has 0 bytes"),
    "data missing": (lambda p: next(p.glob("state.data*")).unlink(), "of-00001 is missing"),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest empty": (lambda p: (p / "manifest.json").write_text(""), "manifest.json is damaged"),
    "manifest cut short": (
        lambda p: (p / "manifest.json").write_text('{"step": 8'),
        "manifest.json is damaged",
    ),
}


@pytest.fixture(scope="module")
def trained(jobs, tmp_path_factory):  # noqa: F811
    """Returns the directory of a run of 6 steps, with checkpoints 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    assert jobs(directory, "--steps=6").code == 0
    return directory


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize("damage", some_of(DAMAGES, "truncated", "a bit flipped", "manifest cut short"))
def test_the_newest_one_damaged_is_passed_over_and_set_aside(jobs, unbroken, run, damage):  # noqa: F811
    apply_damage, warning = DAMAGES[damage]
    newest = run / "checkpoints" / "ckpt-6"
    apply_damage(newest)
    before = {p.name: p.read_bytes() for p in newest.iterdir()}
    result = jobs(run)
    assert result.code == 0 and result.json["began"] == 4, result.output
    assert result.json["final"] == unbroken
    assert checkpoints(run) == [2, 4, 6, 8]  # saved again in the same place
    aside = run / "checkpoints" / "damaged" / "ckpt-6"
    assert {p.name: p.read_bytes() for p in aside.iterdir()} == before
    assert f"Moved the damaged checkpoint ckpt-6 to {aside}" in result.output
    assert f"Skipping the damaged checkpoint {newest}: " in result.output
    assert warning in result.output
    newest = run / "checkpoints" / "ckpt-8"
    truncate_data(newest)
    next_result = jobs(run)
    assert next_result.json["began"] == 6 and next_result.json["final"] == unbroken
    assert names(run / "checkpoints" / "damaged") == ["ckpt-6", "ckpt-8"]


def test_all_damaged_is_an_error_and_nothing_is_moved(jobs, run):  # noqa: F811
    for step, damage in ((2, "truncated"), (4, "manifest empty"), (6, "index missing")):
        DAMAGES[damage][0](run / "checkpoints" / f"ckpt-{step}")
    before = sorted(p for p in (run / "checkpoints").rglob("*"))
    result = jobs(run)
    assert result.code == 2 and "Every checkpoint in" in result.json["error"]
    assert all(f"ckpt-{step}" in result.json["error"] for step in (2, 4, 6))
    assert "began" not in result.json
    assert sorted(p for p in (run / "checkpoints").rglob("*")) == before


@pytest.mark.parametrize("content", [None, b"", b'model_checkpoint_path: "ck', b"\xff\x00"])
def test_tensorflow_s_state_file_is_not_read(jobs, unbroken, run, content):  # noqa: F811
    state_file = run / "checkpoints" / "checkpoint"
    if content is not None:
        state_file.write_bytes(content)
    result = jobs(run)
    assert result.code == 0 and result.json["began"] == 6 and result.json["final"] == unbroken
    assert content is None or state_file.read_bytes() == content


def test_another_model_is_one_error_with_a_list_and_nothing_is_touched(jobs, run):  # noqa: F811
    before = {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}
    result = jobs(run, "--framework=module", "--dropout=0", "--width=3")
    assert result.code == 2
    error = result.json["error"]
    for message in ("no variable was restored", "missing in the checkpoint: model/w0 [8, 16]",
                  "missing in the checkpoint: large/Variable [3, 256]",
                  "not in this model: model/sequential/dense/kernel [8, 16]"):  # fmt: skip
        assert message in error
    assert {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()} == before


def test_a_directory_that_cannot_be_written_is_an_error_before_the_first_step(jobs, tmp_path):  # noqa: F811
    """Promise 23. Permissions would not stop root; a file in the way does."""
    (tmp_path / "file").write_text("")
    message_by_path = (
        (tmp_path / "file" / "run", "is a file, or lies in one"),
        ("/proc/run", "cannot be written"),
    )
    for path, message in message_by_path:
        result = jobs(path)
        assert result.code == 2 and message in result.json["error"], result.output
        assert "began" not in result.json and "step 1" not in result.output
