"""Trains with a kept best checkpoint, resumes, and prints the best step of both runs as JSON.

python best_results.py MODEL_DIR
"""

import json
import sys

import ctl
from small_models import Small, every_step


def best_of(steps: int, model_dir: str, strategy) -> list:
    intervals = every_step(evaluate=ctl.Every(steps=2))
    options = {"model_dir": model_dir, "strategy": strategy, "writers": [], "intervals": intervals}
    result = Small(keep="2,best=loss,mode=max", **options).train(steps)
    return [result.best_step, result.best_metrics]


if __name__ == "__main__":
    strategy = ctl.make_strategy("auto")
    print(json.dumps({"best": [best_of(n, sys.argv[1], strategy) for n in (4, 8)]}), flush=True)
