"""Example scripts with the API of Horovod: `ctlrun -np 2 python -m models.horovod.mnist_tape`."""
