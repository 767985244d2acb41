"""Parameter server training with asynchronous workers."""
