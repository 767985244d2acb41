"""Images of digits from the repository, an .npz or idx files, and errors for invalid files."""

import gzip
import struct

import ctl
import numpy as np
import pytest

from models.data import digits

NAMES = {
    "x_train": "train-images-idx3-ubyte", "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte", "y_test": "t10k-labels-idx1-ubyte",
}  # fmt: skip


def arrays(**changes):
    draw = np.random.default_rng(0)
    return {
        "x_train": draw.integers(0, 256, [5, 28, 28]).astype(np.uint8),
        "y_train": np.array([0, 9, 3, 3, 1], np.uint8),
        "x_test": draw.integers(0, 256, [2, 28, 28]).astype(np.uint8),
        "y_test": np.array([7, 8], np.uint8),
        **changes,
    }


def write_npz(directory, **changes):
    path = directory / "digits.npz"
    np.savez(path, **{k: v for k, v in arrays(**changes).items() if v is not None})
    return str(path)


def idx_content(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(directory, compress=False):
    for key, array in arrays().items():
        content = idx_content(array)
        path = directory / (NAMES[key] + (".gz" if compress else ""))
        path.write_bytes(gzip.compress(content) if compress else content)
    return str(directory)


def assert_equals_written_arrays(loaded):
    expected = arrays()
    for part in ("train", "test"):
        np.testing.assert_array_equal(loaded[part]["image"], expected[f"x_{part}"])
        np.testing.assert_array_equal(loaded[part]["label"], expected[f"y_{part}"])
        assert loaded[part]["image"].dtype == np.uint8 and loaded[part]["label"].dtype == np.int64


def test_the_shipped_digits_are_complete():
    loaded = digits.load()
    assert loaded["train"]["image"].shape == (5000, 28, 28)
    assert loaded["test"]["image"].shape == (1000, 28, 28)
    for part in loaded.values():
        assert part["image"].dtype == np.uint8 and part["image"].max() == 255
        assert set(part["label"]) == set(range(10)) and part["label"].dtype == np.int64


def test_an_npz_is_read(tmp_path):
    assert_equals_written_arrays(digits.load(write_npz(tmp_path)))


@pytest.mark.parametrize("compress", [False, True])
def test_idx_files_are_read_also_compressed(tmp_path, compress):
    assert_equals_written_arrays(digits.load(write_idx(tmp_path, compress)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "has no y_test; expected the keys x_train.*found x_train, y_train, x_test"),
        ({"x_train": np.zeros([5, 28, 27], np.uint8)}, r"images \(5, 28, 27\).*\[n, 28, 28\]"),
        ({"x_test": np.zeros([2, 28, 28, 1], np.uint8)}, r"images \(2, 28, 28, 1\)"),
        ({"y_train": np.zeros([4], np.uint8)}, r"labels \(4,\); expected"),
        ({"y_test": np.array([1, 10])}, "labels up to 10; expected 0 to 9"),
        ({"y_test": np.array([-1, 3])}, "labels .*expected 0 to 9"),
    ],
)
def test_a_wrong_npz_is_refused_by_key_shape_or_label(tmp_path, changes, message):
    with pytest.raises(ctl.UsageError, match=message):
        digits.load(write_npz(tmp_path, **changes))


@pytest.mark.parametrize("changes", [
    {"x_train": np.zeros([5, 28, 28], np.float32)}, {"y_train": np.array([0.5, 1, 2, 3, 4])},
], ids=["fractions as pixels", "fractions as labels"])  # fmt: skip
def test_numbers_that_are_not_whole_are_refused(tmp_path, changes):
    with pytest.raises(ctl.UsageError, match="float"):
        digits.load(write_npz(tmp_path, **changes))


def test_an_invalid_or_missing_npz_is_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ctl.UsageError, match=r"text\.npz cannot be read as \.npz"):
        digits.load(str(tmp_path / "text.npz"))
    with pytest.raises(ctl.UsageError, match="neither a file nor a directory; expected shipped"):
        digits.load(str(tmp_path / "nothing"))


def test_a_directory_without_the_files_names_the_first_that_is_missing(tmp_path):
    with pytest.raises(ctl.UsageError, match="has no train-images-idx3-ubyte .*four idx files"):
        digits.load(str(tmp_path))
    write_idx(tmp_path)
    (tmp_path / NAMES["y_test"]).unlink()
    with pytest.raises(ctl.UsageError, match="has no t10k-labels-idx1-ubyte"):
        digits.load(str(tmp_path))


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 3, 10, 1000])
def test_a_truncated_idx_file_is_named(tmp_path, compress, num_bytes):
    write_idx(tmp_path, compress)
    path = tmp_path / (NAMES["x_train"] + (".gz" if compress else ""))
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ctl.UsageError, match=f"{path.name} cannot be read as an idx file"):
        digits.load(str(tmp_path))


def test_a_compressed_file_with_a_flipped_byte_is_named(tmp_path):
    write_idx(tmp_path, compress=True)
    path = tmp_path / (NAMES["x_train"] + ".gz")
    for position in (12, 30, 200):
        content = bytearray(gzip.compress(idx_content(arrays()["x_train"])))
        content[position] ^= 0xFF
        path.write_bytes(bytes(content))
        with pytest.raises(ctl.UsageError, match=f"{path.name} cannot be read"):
            digits.load(str(tmp_path))


def test_idx_of_another_type_is_refused(tmp_path):
    write_idx(tmp_path)
    path = tmp_path / NAMES["x_test"]
    path.write_bytes(b"\0\0\x0d" + path.read_bytes()[3:])
    with pytest.raises(ctl.UsageError, match="does not begin as idx of unsigned bytes"):
        digits.load(str(tmp_path))
