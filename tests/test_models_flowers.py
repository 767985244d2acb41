"""Photos in folders: accepted files, the split, skipped files, and equal numbers on replicas."""

import logging
import os
import shutil
import struct

import ctl
import keras
import numpy as np
import photos as sample
import pytest
import tensorflow as tf
from small_models import every_step, losses

from models.flowers import files, photos
from models.flowers.model import Flowers
from models.flowers.reading import Reading

SIZE = 24


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """Five classes of eight photos."""
    return sample.make(tmp_path_factory.mktemp("photos"), per_class=8, height=60, width=80)


@pytest.fixture
def folder(shipped, tmp_path):
    """A copy that a test may change."""
    shutil.copytree(shipped, tmp_path / "flower_photos")
    return tmp_path / "flower_photos"


def make_trainer(folder, *, strategy="default", reading=Reading(), **options):  # noqa: B008  frozen
    options = {"global_batch_size": 8, "image_size": SIZE, "intervals": every_step(), **options}
    options.setdefault("writers", [])
    return Flowers(data_dir=str(folder), strategy=strategy, reading=reading, **options)


def batches(trainer, count=6, replicas=range(1), num_replicas=1):
    data = trainer.train_data(8).replica_batches(
        seed=0, start=0, total=None, replicas=replicas, num_replicas=num_replicas
    )
    return list(data.take(count))


def test_the_classes_are_the_folders_and_an_archive_within_a_folder_is_found(shipped):
    for directory in (shipped, shipped.parent):
        photo_set = photos.find(str(directory))
        assert photo_set.classes == sample.CLASSES
        assert len(photo_set.paths) == 40 and photo_set.name(0) == "brick/0000.jpg"
        assert np.bincount(photo_set.labels).tolist() == [8] * 5


def test_the_split_is_that_of_keras_with_the_same_seed(shipped):
    photo_set = photos.find(str(shipped))
    for part, subset in (("train", "training"), ("test", "validation")):
        keras_dataset = keras.utils.image_dataset_from_directory(
            shipped, validation_split=0.2, subset=subset, seed=123, verbose=False
        )
        own_paths = [str(photo_set.paths[i]) for i in photo_set.split(123)[part]]
        assert sorted(own_paths) == sorted(keras_dataset.file_paths)


def test_a_photo_beside_the_folders_of_an_archive_hides_no_class(shipped, tmp_path):
    inner = tmp_path / "data" / "flower_photos"
    shutil.copytree(shipped, inner)
    shutil.copy(next((inner / "brick").iterdir()), inner / "stray.jpg")
    assert photos.find(str(tmp_path / "data")).classes == sample.CLASSES


def test_hidden_files_are_left_out_and_names_in_capitals_are_not(folder):
    (folder / "brick" / ".DS_Store").write_bytes(b"x")
    (folder / "brick" / "._0000.jpg").write_bytes(b"x")
    (folder / ".cache").mkdir()
    (folder / "brick" / "0001.jpg").rename(folder / "brick" / "0001.JPG")
    (folder / "brick" / "0002.jpg").rename(folder / "brick" / "0002.JPEG")
    assert len(photos.find(str(folder)).paths) == 40


def test_links_in_a_circle_are_no_classes(folder):
    (folder / "again").symlink_to(folder, target_is_directory=True)
    (folder / "above").symlink_to(folder.parent, target_is_directory=True)
    (folder / "itself").symlink_to(folder / "itself")
    (folder / "brick" / "inside").symlink_to(folder / "brick", target_is_directory=True)
    (folder / "linked").symlink_to(shutil.copytree(folder / "grass", folder.parent / "more"))
    assert photos.find(str(folder)).classes == (*sample.CLASSES, "linked")


def remove_all_classes_but_one(root):
    for name in sample.CLASSES[1:]:
        shutil.rmtree(root / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "does not exist; expected a directory"),
        (lambda root: (shutil.rmtree(root), root.write_bytes(b"")), "is a file; expected a directory"),
        (remove_all_classes_but_one, "has one class, brick; expected at least two"),
        (lambda root: (root / "empty").mkdir(), "folders without any .jpg file: empty; expected photos"),
        (lambda root: [p.unlink() for p in root.rglob("*.jpg")], "no folder with .jpg files"),
    ],
    ids=["missing", "a file", "one class", "an empty class", "no photos"],
)
def test_a_path_that_is_no_folder_of_classes_is_refused(folder, change, message):
    change(folder)
    with pytest.raises(ctl.UsageError, match=message):
        make_trainer(folder)


def with_huge_size(content):
    """Returns the JPEG with a size of 60,000 x 60,000 in its header."""
    at = content.index(b"\xff\xc0")
    return content[: at + 5] + struct.pack(">HH", 60_000, 60_000) + content[at + 9 :]


def add_unusable_files(folder):
    """Adds unusable files of each type and returns the reason by name."""
    brick = folder / "brick"
    content = (brick / "0000.jpg").read_bytes()
    picture = tf.io.decode_jpeg(content)
    contents = {
        "empty": b"", "text": b"not a picture", "truncated": content[: len(content) // 2],
        "without its end": content[:-2], "huge": with_huge_size(content),
        "png": tf.io.encode_png(picture).numpy(),
    }  # fmt: skip
    for name, file_content in contents.items():
        (brick / f"{name}.jpg").write_bytes(file_content)
    os.mkfifo(brick / "pipe.jpg")
    (brick / "nowhere.jpg").symlink_to(folder / "nothing")
    return {
        "empty": "empty", "text": "not a JPEG", "truncated": "damaged", "without its end": "damaged",
        "huge": "3,600,000,000 pixels", "png": "a PNG", "pipe": "not a file",
        "nowhere": "No such file or directory",
    }  # fmt: skip


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_files_that_cannot_be_used_are_left_out_with_one_warning(folder, caplog, cache):
    reasons = add_unusable_files(folder)
    for name in ("china/a.png", "grass/notes.txt"):
        (folder / name).write_bytes(b"x")
    trainer = make_trainer(folder, reading=Reading(cache=cache))
    with caplog.at_level(logging.WARNING, "ctl"):
        trainer.eval_data(8), trainer.train_data(8)
    (warning,) = [r.getMessage() for r in caplog.records]
    assert f"{len(reasons) + 2} of 50 files" in warning
    for name, reason in reasons.items():
        assert f"brick/{name}.jpg ({reason})" in warning
    for name in ("china/a.png", "grass/notes.txt"):
        assert f"{name} (not named .jpg)" in warning
    assert sum(len(rows) for rows in trainer._pictures.rows.values()) == 40


def test_strict_data_refuses_them_before_training(folder):
    (folder / "grass" / "bad.jpg").write_bytes(b"")
    trainer = make_trainer(folder, reading=Reading(strict=True))
    with pytest.raises(ctl.UsageError, match=r"1 of 41 files.*grass/bad.jpg \(empty\).*--strict_data"):
        trainer.train(1)
    assert trainer.step == 0


def test_a_bucket_is_a_path(folder):
    with pytest.raises(ctl.UsageError, match="gs://b/photos is a URL.*/gcs/b/photos"):
        photos.find("gs://b/photos")
    with pytest.raises(ctl.UsageError, match="--images=s3://b/a.jpg is a URL.*copy the photos"):
        files.find_images("s3://b/a.jpg")


def test_a_class_without_any_usable_photo_is_refused(folder):
    for path in (folder / "china").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ctl.UsageError, match="No photo of china remains"):
        make_trainer(folder).train(1)


def test_grey_and_cmyk_photos_become_rgb(folder):
    from PIL import Image

    colours = folder / "flower" / "0000.jpg"
    before = np.asarray(Image.open(colours).resize((SIZE, SIZE)), np.float32)
    Image.open(colours).convert("CMYK").save(colours)
    trainer = make_trainer(folder)
    assert [tuple(b["image"].shape) for b in batches(trainer, 1)] == [(8, SIZE, SIZE, 3)]
    paths = photos.find(str(folder)).paths
    numbers = [paths.index(folder / "brick" / "0000.jpg"), paths.index(colours)]
    grey, cmyk = trainer._pictures.get(tf.constant(numbers)).numpy()
    assert (grey[..., 0] == grey[..., 2]).all() and grey.std() > 5
    assert np.abs(before[..., 0] - before[..., 2]).mean() > 10
    assert np.abs(cmyk - before).mean() < 8


def test_a_cache_changes_nothing_but_the_time(shipped):
    batches_from_memory, batches_without_cache = (
        batches(make_trainer(shipped, reading=Reading(cache=c))) for c in ("memory", "none")
    )
    for a, b in zip(batches_from_memory, batches_without_cache, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_two_replicas_learn_as_one_and_the_batch_grows_with_them(shipped, two_replicas):
    curves = []
    for strategy, options in (
        ("default", {"global_batch_size": 8}), (two_replicas, {"batch_size_per_replica": 4}),
    ):  # fmt: skip
        writer = ctl.MemoryWriter()
        trainer = make_trainer(shipped, strategy=strategy, writers=[writer], **options)
        assert trainer.global_batch_size == 8
        trainer.train(6)
        curves.append(losses(writer))
    np.testing.assert_allclose(*curves, rtol=1e-4)


def test_a_run_remembers_its_classes_and_refuses_others(shipped, folder, tmp_path):
    model_dir = str(tmp_path / "run")
    make_trainer(shipped, model_dir=model_dir).train(1)
    restored = Flowers(model_dir=model_dir, strategy="default", images=str(shipped / "brick"))
    assert restored.classes == sample.CLASSES and restored.image_size == SIZE
    restored.prepare()
    rows = list(restored.predict())
    assert len(rows) == 8 and set(rows[0]["probabilities"]) == set(sample.CLASSES)
    (folder / "grass").rename(folder / "lawn")
    with pytest.raises(ctl.UsageError, match="has brick, china, flower, grass, gravel"):
        make_trainer(folder, model_dir=model_dir)


def test_a_run_refuses_another_size_and_another_split(shipped, tmp_path):
    make_trainer(shipped, model_dir=str(tmp_path)).train(1)
    for options, message in (
        ({"image_size": 16}, "--image_size is 16; the run in .* has 24"),
        ({"reading": Reading(split_seed=5)}, "--split_seed is 5; the run in .* has 123"),
    ):
        with pytest.raises(ctl.UsageError, match=message):
            make_trainer(shipped, model_dir=str(tmp_path), **options)


def test_training_without_photos_is_refused():
    with pytest.raises(ctl.UsageError, match="--data_dir is missing"):
        Flowers(strategy="default", writers=[]).train(1)


def test_images_to_predict_are_paths_patterns_or_a_directory(shipped, tmp_path):
    assert len(files.find_images(str(shipped))) == 40
    path, pattern = shipped / "brick" / "0003.jpg", shipped / "grass" / "000[12].jpg"
    assert [p.name for p in files.find_images(f"{path}, {pattern}")] == [
        "0003.jpg", "0001.jpg", "0002.jpg"]  # fmt: skip
    for argument, message in (("", "needs --images"), (str(tmp_path / "x*.jpg"), "no file matches")):
        with pytest.raises(ctl.UsageError, match=message):
            files.find_images(argument)
