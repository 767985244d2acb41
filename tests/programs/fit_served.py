"""`ctl.fit` as the task of TF_CONFIG. The chief of a job with parameter servers prints JSON."""

import json

import ctl
import keras
import numpy as np

strategy = ctl.make_strategy()
x = np.random.default_rng(0).normal(size=(512, 6)).astype(np.float32)
y = (x[:, 0] + 2 * x[:, 1] - x[:, 2] > 0).astype(np.int64)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
history = ctl.fit(model, x, y, batch_size=32, epochs=6, validation_data=(x[:100], y[:100]), verbose=0)
print(json.dumps({**history.history, "iterations": int(model.optimizer.iterations.numpy())}))
