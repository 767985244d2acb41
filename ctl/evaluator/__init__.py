"""Evaluator process: evaluates each checkpoint that another process saves."""
