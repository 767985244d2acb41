"""`ctl deploy`: what a platform needs to run a training, written from one command line.

A command line is read (`args`, `validators`, `secret_check`), a platform's module makes values of it,
`manifest` puts them into the files of templates/, `output` writes the result. Facts that a platform checks
itself (machine types, regions, limits) do not belong here. Nothing imports TensorFlow; only `--submit`
sends something.
"""
