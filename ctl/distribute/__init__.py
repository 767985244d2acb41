"""Creation of the distribution strategy, and the start and the shutdown of a job's processes.

Input is the environment (TF_CONFIG or the variables of a platform), output is a strategy and the topology
of the job. Steps, data and checkpoints do not belong here.
"""
