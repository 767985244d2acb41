"""Who this process is, which strategy it uses, and how workers start and leave together.

Steps, data and checkpoints do not belong here. TF_CONFIG comes in, a strategy and its place in the
job go out.
"""
