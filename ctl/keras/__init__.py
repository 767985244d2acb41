"""Compiled Keras models: `ctl.fit`, `ctl.evaluate` and the trainer that they stand on.

Only what a compiled model needs beyond `ctl.Trainer`. A model and data come in, a history goes out.
"""
