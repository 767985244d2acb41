"""Scripts in Horovod's style: `ctlrun -np 2 python -m models.horovod.mnist_tape`."""
