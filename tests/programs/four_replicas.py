"""The worker of compare.py with two replicas of its own."""

import sys

import compare
import two_cpus_per_worker  # noqa: F401  before anything else

compare.main("multi_worker", int(sys.argv[1]))
