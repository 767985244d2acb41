"""Where numbers, images and events of a run go: console, TensorBoard, metrics.jsonl, memory.

How numbers are computed belongs to `step/`. Steps and values come in, files and lines go out.
"""
