"""One run: open the data, loop over steps, log, evaluate, save, call callbacks.

Calls of a user's code and the order of things belong here; steps, data, checkpoints and metrics have
folders of their own. A trainer comes in, numbers and checkpoints come out.
"""
