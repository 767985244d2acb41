"""Training of compiled Keras models: `ctl.fit`, `ctl.evaluate`, `ctl.predict` and their trainers.

The modules contain only the parts that a compiled model needs in addition to `ctl.Trainer`.
"""
