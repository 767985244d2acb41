"""Trainer of the codelab's network: three convolutions, trained on photos in folders."""

import json

import ctl
import keras
import tensorflow as tf

from models.flowers import files, photos
from models.flowers.reading import Reading, decode_photos, open_photos

IMAGE_SIZE = 180


class Flowers(ctl.Trainer):
    """A classifier of photos. Images are uint8 `[b, size, size, 3]`, labels int64 `[b]`.

    Without `data_dir` the classes are those of the run in model_dir.
    """

    def __init__(
        self, config=None, *, data_dir="", image_size=None, batch_size_per_replica=None, images="",
        learning_rate=1e-3, reading=None, **options,
    ):  # fmt: skip
        super().__init__(config, **options)
        if batch_size_per_replica:
            self.global_batch_size = batch_size_per_replica * self.topology.num_replicas
        self.photos = photos.find(data_dir) if data_dir else None
        self.images, self.reading, self._pictures = images, reading or Reading(), None
        previous = files.read_config(self.model_dir)
        self.learning_rate = learning_rate
        self._check_unchanged("image_size", image_size, previous)
        self._check_unchanged("split_seed", self.reading.split_seed, previous)
        self.image_size = image_size or previous.get("image_size", IMAGE_SIZE)
        classes = tuple(json.loads(previous.get("classes", "[]")))
        self.classes = self.photos.classes if self.photos else classes
        if classes and self.classes != classes:
            raise ctl.UsageError(
                f"--data_dir={data_dir} has the classes {', '.join(self.classes)}; the run in "
                f"{self.model_dir} has {', '.join(classes)}. Write another --model_dir."
            )
        settings = {"image_size": self.image_size, "split_seed": self.reading.split_seed}
        self.hparams = {"classes": json.dumps(self.classes), **settings}

    def build(self):
        """Creates the network and the served function."""
        self._required(self.classes)
        self.model = keras.Sequential([
            keras.Input((self.image_size, self.image_size, 3)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(len(self.classes)),
        ])  # fmt: skip
        self.optimizer = keras.optimizers.Adam(self.learning_rate)
        encoded = tf.TensorSpec([None], tf.string, name="image_bytes")
        self._served = tf.function(self.classify, input_signature=[encoded])

    def train_data(self, batch_size):
        """Returns batches of training photos."""
        return self._data("train", batch_size)

    def eval_data(self, batch_size):
        """Returns batches of held-out photos."""
        return self._data("test", batch_size)

    def score(self, batch, training):
        """Returns loss and accuracy of each photo, `[b]`."""
        logits = self.model(batch["image"], training=training)
        return {
            "loss": tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits),
            "accuracy": tf.equal(tf.argmax(logits, axis=1), batch["label"]),
        }

    def train_step(self, batch):
        """Trains on one replica's part of the batch."""
        with tf.GradientTape() as tape:
            scores = self.score(batch, training=True)
            loss = self.average(scores["loss"])
        self.minimize(loss, tape)
        return scores

    def eval_step(self, batch):
        """Evaluates one replica's part of the batch."""
        return self.score(batch, training=False)

    def classify(self, encoded):
        """Returns the response of a server of the SavedModel for contents of JPEG files, string `[b]`."""
        images = decode_photos(encoded, self.image_size)
        probabilities = tf.nn.softmax(self.model(images, training=False))
        index = tf.argmax(probabilities, axis=1)
        names = tf.gather(tf.constant(self.classes), index)
        return {"probabilities": probabilities, "class_index": index, "class_name": names}

    def signatures(self):
        """Returns the function that the SavedModel serves."""
        return {"serving_default": self._served}

    def predict(self):
        """Yields a dictionary per file of --images, with the prediction or the reason of an error."""
        for path in files.find_images(self.images):
            try:
                answer = self._served([files.read(path, self.reading.max_pixels)])
            except (files.UnusableError, tf.errors.InvalidArgumentError) as e:
                reason = str(e) if isinstance(e, files.UnusableError) else "damaged"
                yield {"path": str(path), "error": reason}
                continue
            probabilities = answer["probabilities"][0].numpy().tolist()
            yield {
                "path": str(path),
                "label": answer["class_name"][0].numpy().decode(),
                "probability": max(probabilities),
                "probabilities": dict(zip(self.classes, probabilities, strict=True)),
            }

    def _data(self, part, batch_size):
        photos = self._required(self.photos)
        if self._pictures is None:
            self._pictures = open_photos(photos, self.reading, self.image_size, self)
        rows, get = self._pictures.rows[part], self._pictures.get
        arrays = {"index": rows, "label": photos.labels[rows]}
        return ctl.from_arrays(arrays, batch_size).map(
            lambda batch: {"image": get(batch["index"]), "label": batch["label"]}
        )

    @staticmethod
    def _required(value):
        """Returns a value that --data_dir determines. Raises UsageError if it is missing."""
        if not value:
            raise ctl.UsageError("--data_dir is missing; expected a directory with a folder per class.")
        return value

    def _check_unchanged(self, flag, value, previous):
        """Raises UsageError if a setting differs from that of the run in model_dir.

        Another split would train on held-out photos. Another image size does not fit the weights.
        """
        if self.photos and value is not None and previous.get(flag, value) != value:
            raise ctl.UsageError(
                f"--{flag} is {value}; the run in {self.model_dir} has {previous[flag]}. Write that, or "
                "another --model_dir."
            )
