"""The models of docs/gallery.md: equal numbers on replicas, data, pictures and served models."""

import ast
import functools
import gzip

import ctl
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT, some_of
from ctl import testing
from example_models import import_model
from gallery_models import CASES, SMALL, Language, Recommender, ResNet, SimClr, losses
from small_models import every_step
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from models.data import images, tastes, text

resnet = import_model("resnet")


@functools.cache
def of_one_device(name):
    model, options = CASES[name]
    return losses(model, "default", **options)


FAST_NAMES_ON_WORKERS = ("recommender",)  # by default, and another one on two replicas


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_numbers_are_the_same_on_two_replicas(name):
    model, options = CASES[name]
    testing.assert_same_on_replicas(model, global_batch_size=8, rtol=5e-4, atol=2e-5, **options)


@pytest.mark.parametrize(
    "names", some_of([FAST_NAMES_ON_WORKERS, ("language", "resnet", "simclr")], FAST_NAMES_ON_WORKERS)
)
def test_losses_are_the_same_on_two_workers(run_program, names):
    program = ["tests/programs/gallery_models.py", *names]
    chief, other = (result.json for result in run_program(2, program))
    for name in names:
        np.testing.assert_allclose(chief[name], of_one_device(name), rtol=2e-4)
    assert {*other} == {*chief} == {*names}


def tags_of(model_dir):
    """Returns the tags of all TensorBoard events of a run."""
    files = [file for run in ("train", "eval") for file in (model_dir / "logs" / run).glob("events*")]
    summaries = [event.summary.value for file in files for event in EventFileLoader(str(file)).Load()]
    return {value.tag for values in summaries for value in values}


def test_a_text_is_cut_into_consecutive_rows(tmp_path):
    path = tmp_path / "text.gz"
    content = bytes(range(256)) * 4
    path.write_bytes(gzip.compress(content))
    rows = text.load(str(path), 7)
    assert rows["train"].shape == (115, 8) and rows["test"].shape == (13, 8)
    assert b"".join(row.tobytes() for part in ("train", "test") for row in rows[part]) == content
    shipped = text.load("shipped", 127)
    assert shipped["train"][0].tobytes().startswith(b"CHAPTER 1. Loomings.\n\nCall me Ishmael.")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"short", r"has 5 bytes; expected 187"), (b"no gzip", "cannot be read")],
)
def test_an_invalid_text_is_refused(content, message, tmp_path):
    path = tmp_path / ("text.gz" if content == b"no gzip" else "text")
    if content:
        path.write_bytes(content)
    with pytest.raises(ctl.UsageError, match=message):
        Language(strategy="default", data=str(path), **{**SMALL, "context": 16})


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Language, {**SMALL, "heads": 3}, "multiple of --heads=3"),
        (Language, {**SMALL, "ema": 1.0}, "--ema is 1.0"),
        (ResNet, {"label_smoothing": 1.0}, "--label_smoothing is 1.0"),
        (ResNet, {"data": "nowhere"}, "--data=nowhere is no .npz"),
        (SimClr, {"temperature": 0.0}, "--temperature is 0.0"),
    ],
)
def test_invalid_settings_are_refused(model, options, message):
    with pytest.raises(ctl.UsageError, match=message):
        model(strategy="default", **options)


@pytest.mark.slow
def test_text_is_generated_byte_by_byte_from_the_context():
    trainer = Language(strategy="default", global_batch_size=8, writers=[], **{**SMALL, "context": 6})
    trainer.train(2)
    prompts = ["a", "longer than what is seen"]
    actual = trainer.generate(tf.constant(prompts), 10, 0.0).numpy()
    for prompt, generated in zip(prompts, actual, strict=True):
        expected = b"\n" + prompt.encode()
        for _ in range(10):
            window_bytes = expected[-6:]
            window = np.zeros([1, 6], np.int32)
            window[0, : len(window_bytes)] = list(window_bytes)
            expected += bytes([int(np.argmax(trainer.model(window)[0, len(window_bytes) - 1]))])
        assert generated == expected[1:]
    first, second = (trainer.generate(tf.constant(["a"]), 30, 2.0).numpy() for _ in range(2))
    assert first == second and first != trainer.generate(tf.constant(["a"]), 30, 0.0).numpy()


@pytest.mark.slow
def test_text_is_shown_predicted_and_served(tmp_path):
    trainer = Language(strategy="default", global_batch_size=8, model_dir=tmp_path, prompt=["Call me"],
                       length=5, **{**SMALL, "show_every_steps": 2},
                       intervals=every_step(steps_per_loop=1, evaluate=ctl.Every(steps=2)))  # fmt: skip
    trainer.train(2, export=["saved_model"])
    shown = [
        value.tensor.string_val[0].decode()
        for file in (tmp_path / "logs" / "train").glob("events*")
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value if value.tag.startswith("text")
    ]  # fmt: skip
    assert len(shown) == 1 and "'Call me" in shown[0]
    (line,) = trainer.predict()
    assert line["prompt"] == "Call me" and line["text"].startswith("Call me")
    served = tf.saved_model.load(f"{tmp_path}/export/saved_model").signatures["serving_default"]
    texts = served(prompts=tf.constant(["one", "two"]))["texts"].numpy()
    assert [len(text) for text in texts] == [8, 8] and texts[0].startswith(b"one")


@pytest.mark.parametrize("steps", some_of([0, 2], 0))
def test_layers_compute_in_bfloat16_and_weights_stay_float32(steps):
    options = {"strategy": "default", "global_batch_size": 8, "precision": "mixed_bfloat16"}
    trainer = Language(writers=[], **options, **SMALL)
    trainer.train(steps) if steps else trainer.prepare()
    block = next(layer for layer in trainer.model.layers if type(layer).__name__ == "Block")
    assert block.compute_dtype == "bfloat16" and block.expand.kernel.dtype == "float32"
    assert trainer.model.output.dtype == "float32"


def pictures(folder, count, seed):
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for i in range(count):
        shape = [6, 8, 3] if i % 2 else [5, 5, 1]
        image = random.integers(256, size=shape, dtype=np.uint8)
        name = f"{i}.{'png' if i % 2 else 'jpg'}"
        encode = tf.io.encode_png if i % 2 else tf.io.encode_jpeg
        (folder / name).write_bytes(encode(image).numpy())


def test_pictures_in_folders_of_classes(tmp_path):
    for number, name in enumerate(("cat", "dog")):
        pictures(tmp_path / "all" / name, 10, number)
        pictures(tmp_path / "parts" / "train" / name, 3, number)
        pictures(tmp_path / "parts" / "test" / name, 2, number)
    actual, names = images.load(str(tmp_path / "all"), size=7)
    assert names == ["cat", "dog"]
    assert actual["train"]["image"].shape == (18, 7, 7, 3) and actual["test"]["image"].shape == (2, 7, 7, 3)
    assert actual["test"]["label"].tolist() == [0, 1]
    tenth = [images._picture(tmp_path / "all" / name / "9.png", 7) for name in names]
    assert (actual["test"]["image"] == tenth).all()
    actual, _ = images.load(str(tmp_path / "parts"), size=7)
    assert actual["train"]["label"].tolist() == [0, 0, 0, 1, 1, 1]
    assert actual["test"]["label"].tolist() == [0, 0, 1, 1]
    assert actual["train"]["image"].std() > 0
    (tmp_path / "all" / "cat" / "0.jpg").write_bytes(b"nothing")
    with pytest.raises(ctl.UsageError, match=r"cat/0.jpg cannot be read"):
        images.load(str(tmp_path / "all"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros([4, 8, 8])}, "of float64"),
        ({"y_test": np.zeros([3], int)}, "for test"),
        ({"y_train": np.zeros([4])}, "expected whole numbers"),
        ({"x_test": np.zeros([0, 8, 8], np.uint8), "y_test": np.zeros([0], int)}, "no images for test"),
        ({"x_train": np.zeros([4, 8, 8, 2], np.uint8)}, r"\[4, 8, 8, 2\]"),
    ],
)
def test_an_invalid_npz_is_refused(change, message, tmp_path):
    x, y = np.zeros([4, 8, 8, 3], np.uint8), np.array([0, 1, 2, 2])
    arrays = {"x_train": x, "y_train": y, "x_test": x[:2], "y_test": y[:2]}
    np.savez(tmp_path / "good.npz", **arrays)
    actual, names = images.load(str(tmp_path / "good.npz"))
    assert names == ["0", "1", "2"] and actual["test"]["image"].shape == (2, 8, 8, 3)
    np.savez(tmp_path / "bad.npz", **{**arrays, **change})
    with pytest.raises(ctl.UsageError, match=message):
        images.load(str(tmp_path / "bad.npz"))


def test_the_confusion_matrix_counts_each_image_once(two_replicas, tmp_path):
    class Flat(ResNet):  # a fast model
        def build(self):
            scaled = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(10)]
            self.model = keras.Sequential([keras.Input((28, 28, 1)), *scaled])
            self.optimizer = keras.optimizers.SGD(0.1)
            self.confusion = resnet.Confusion(10, name="confusion")

    trainer = Flat(strategy=two_replicas, global_batch_size=64, model_dir=tmp_path,
                   intervals=every_step(evaluate=ctl.Every(steps=2)))  # fmt: skip
    trainer.arrays = {name: {k: v[:200] for k, v in part.items()} for name, part in trainer.arrays.items()}
    trainer.train(2)
    actual = trainer.evaluate()
    labels = trainer.arrays["test"]["label"]
    np.testing.assert_array_equal(actual["confusion"].sum(axis=1), np.bincount(labels, minlength=10))
    logits = trainer.predict(trainer.arrays["test"]["image"])
    assert np.trace(actual["confusion"]) == (logits.argmax(axis=1) == labels).sum()
    best = np.argsort(-logits, axis=1)[:, :3]
    np.testing.assert_allclose(actual["top3_accuracy"], (best == labels[:, None]).any(axis=1).mean())
    assert {"confusion", "confusion/names"} <= tags_of(tmp_path)


def test_smoothing_shares_a_probability():
    trainer = ResNet(strategy="default", label_smoothing=0.2)
    logits, label = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32), np.arange(4)
    expected = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2, reduction=None)
    actual = trainer.score(tf.constant(logits), tf.constant(label))["loss"]
    np.testing.assert_allclose(actual, expected(np.eye(10)[label], logits), rtol=1e-5)


def test_generated_users_choose_by_taste_and_negatives_are_never_chosen():
    actual = tastes.load(users=50, items=80)
    assert actual["train"]["user"].shape == (550,) and actual["test"]["negatives"].shape == (50, 99)
    second = tastes.load(users=50, items=80)
    assert all((actual[p][k] == second[p][k]).all() for p in actual for k in actual[p])
    for user in (b"user-0", b"user-49"):
        chosen = set(actual["train"]["item"][actual["train"]["user"] == user])
        chosen |= set(actual["test"]["item"][actual["test"]["user"] == user])
        assert len(chosen) == tastes.CHOSEN
        for part in actual.values():
            assert not chosen & set(part["negatives"][part["user"] == user].ravel())


def test_the_metrics_of_the_recommender_depend_on_the_rank_of_the_chosen_item():
    trainer = Recommender(strategy="default", global_batch_size=64, rows=2000, writers=[], top=5)
    trainer.arrays = tastes.load(users=100, items=60)
    trainer.train(3)
    batch = trainer.arrays["test"]
    scores = trainer.score_items({k: tf.constant(v) for k, v in batch.items()}).numpy()
    rank = (scores[:, 1:] >= scores[:, :1]).sum(axis=1)
    gain = np.where(rank < 5, 1 / np.log2(rank + 2), 0.0)
    actual = trainer.evaluate()
    np.testing.assert_allclose(actual["hit_rate_5"], (rank < 5).mean(), rtol=1e-5)
    np.testing.assert_allclose(actual["ndcg_5"], gain.mean(), rtol=1e-5)


def test_the_recommender_changes_only_the_rows_of_a_step():
    trainer = Recommender(strategy="default", global_batch_size=4, rows=5000, writers=[])
    trainer.prepare()
    before = trainer.model.users.table.embeddings.numpy()
    trainer.train(1)
    changed = (trainer.model.users.table.embeddings.numpy() != before).any(axis=1)
    assert 1 <= changed.sum() <= 4


@pytest.mark.slow
def test_the_recommender_serves_an_order_of_items(tmp_path):
    trainer = Recommender(strategy="default", global_batch_size=64, rows=2000, model_dir=tmp_path)
    trainer.train(2, export=["saved_model"])
    served = tf.saved_model.load(f"{tmp_path}/export/saved_model").signatures["serving_default"]
    names = [[f"item-{i}".encode() for i in range(6)]]
    order = served(user=tf.constant(["user-1"]), items=tf.constant(names))["items"].numpy()[0]
    scores = trainer.model((tf.constant(["user-1"]), tf.constant(names))).numpy()[0]
    assert [names[0].index(name) for name in order] == np.argsort(-scores, kind="stable").tolist()


def test_views_find_each_other_among_all_replicas(two_replicas):
    """The loss of each image uses the images of both replicas."""
    first, other = (np.random.default_rng(i).normal(size=(8, 4)).astype(np.float32) for i in (0, 1))
    first, other = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (first, other))

    class Compared(SimClr):
        def train_step(self, batch):
            with tf.GradientTape() as tape:
                losses, hits = self.contrastive_loss(batch["one"], batch["other"])
                loss = self.average(losses) + 0.0 * tf.reduce_sum(self.encoder_variables[0])
            self.minimize(loss, tape, self.encoder_variables)
            return {"loss": losses, "hits": hits}

        def train_data(self, batch_size):
            return ctl.from_arrays({"one": first, "other": other}, batch_size, shuffle=False)

    logits = np.concatenate([first @ other.T, first @ first.T - 1e9 * np.eye(8)], axis=1) / 0.5
    expected = np.log(np.exp(logits).sum(axis=1)) - np.diag(logits[:, :8])
    for strategy in ("default", two_replicas):
        actual = losses(Compared, strategy, 1, temperature=0.5)
        np.testing.assert_allclose(actual, expected.mean(), rtol=1e-5)


NAMES = ["mnist", "language", "resnet", "simclr", "gan", "recommender", "cartpole"]


@pytest.mark.parametrize("name", NAMES)
def test_flags_and_keywords_have_the_same_defaults(name):
    tree = ast.parse((ROOT / f"models/{name}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    flags = [call.args for call in calls if getattr(call.func, "attr", "").startswith("DEFINE_")]
    default_by_flag = {ast.literal_eval(f): ast.literal_eval(default) for f, default, *_ in flags}
    constructors = [node.args for node in ast.walk(tree) if getattr(node, "name", "") == "__init__"]
    by_keyword = {
        keyword.arg: ast.literal_eval(default)
        for constructor in constructors
        for keyword, default in zip(constructor.kwonlyargs, constructor.kw_defaults, strict=True)
    }
    assert len(by_keyword) > 2
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in by_keyword.items()} == default_by_flag
