"""A worker that trains small models and prints their losses and a digest of the weights as JSON."""

import json
import sys

import ctl
from small_models import Small, digest, every_step, losses

# test_strategy_matrix.py has all frameworks with all optimizers
MODELS = [("keras3", "adam"), ("tf_keras", "adam")]


def main(strategy_name: str, steps: int) -> None:
    strategy = ctl.make_strategy(strategy_name, num_virtual_devices=2 if strategy_name == "mirrored" else 0)
    result = {}
    for framework, optimizer in MODELS:
        writer = ctl.MemoryWriter()
        trainer = Small(framework, optimizer, strategy=strategy, intervals=every_step(), writers=[writer])
        trainer.train(steps)
        result[f"{framework} {optimizer}"] = {
            "losses": losses(writer),
            "digest": digest(trainer),
            "eval": trainer.evaluate()["loss"],
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
