"""TensorFlow's multi-worker Keras tutorial on the shipped digits, with the three lines changed for ctl."""

import os
import sys

import ctl
import numpy as np
import tensorflow as tf

from models.data import digits


def mnist_dataset(batch_size):
    train = digits.load("shipped")["train"]
    x_train, y_train = train["image"] / np.float32(255), train["label"].astype(np.int64)
    dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    return dataset.shuffle(60000).repeat().batch(batch_size)


def build_and_compile_cnn_model():
    model = tf.keras.Sequential([
        tf.keras.layers.InputLayer(shape=(28, 28)),
        tf.keras.layers.Reshape(target_shape=(28, 28, 1)),
        tf.keras.layers.Conv2D(32, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(128, activation="relu"),
        tf.keras.layers.Dense(10),
    ])  # fmt: skip
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.05),
        metrics=["accuracy"],
    )
    return model


directory, steps_per_epoch = sys.argv[1], int(sys.argv[2])
strategy = ctl.make_strategy()  # was: tf.distribute.MultiWorkerMirroredStrategy()
global_batch_size = 32 * strategy.num_replicas_in_sync
multi_worker_dataset = mnist_dataset(global_batch_size)
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
history = ctl.fit(  # was: multi_worker_model.fit(
    multi_worker_model, multi_worker_dataset, epochs=3, steps_per_epoch=steps_per_epoch,
    checkpoints=ctl.BackupCheckpoints(os.path.join(directory, "backup")),
)  # fmt: skip

# The remaining lines save the model as in the tutorial.
resolver = strategy.cluster_resolver
task_id = resolver.task_id if resolver else None
path = os.path.join(directory, "keras-model.keras")
if task_id:
    path = os.path.join(directory, f"workertemp_{task_id}", "keras-model.keras")
    os.makedirs(os.path.dirname(path), exist_ok=True)
multi_worker_model.save(path)
if task_id:
    tf.io.gfile.rmtree(os.path.dirname(path))
print(f'{{"loss": {history.history["loss"]}, "accuracy": {history.history["accuracy"]}}}')
