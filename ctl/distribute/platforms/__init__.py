"""Topology of a job from the environment variables of each platform. Does not import TensorFlow."""
