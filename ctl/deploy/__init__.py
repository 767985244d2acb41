"""`ctl deploy`: what a platform needs to run a training, written from one command line.

Pure Python: nothing here imports TensorFlow, and nothing is sent anywhere unless `--submit` is given.
"""
