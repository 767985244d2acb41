"""Metric writers for the console, TensorBoard, metrics.jsonl and memory.

This folder receives steps and values, and writes files and lines. The folder `step/` computes metrics.
"""
