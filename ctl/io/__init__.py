"""Files, logs, channels and the end of the process: what every other folder may use.

No TensorFlow objects and no knowledge of training belong here. Nothing here imports another folder
of `ctl` but `errors`.
"""
