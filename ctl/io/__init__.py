"""Files, logs, authenticated channels and process exit, for use by all other folders.

These modules do not depend on TensorFlow objects or on training. They import only `errors` from `ctl`.
"""
