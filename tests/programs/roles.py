"""A job of any role that trains or evaluates the small model in argv[1] and prints its results."""

import json
import sys

import ctl
from small_models import Small, digest, every_step


def main(model_dir: str, steps: int) -> None:
    writer = ctl.MemoryWriter()
    trainer = Small(
        optimizer="adam", strategy="auto", model_dir=model_dir, writers=[writer],
        intervals=every_step(save=ctl.Every(steps=5), evaluate=ctl.Every(steps=5)),
    )  # fmt: skip
    metrics = trainer.train(steps)
    eval_losses = {step: values["loss"] for run, step, values in writer.rows if run == "eval"}
    role = {"workers": trainer.topology.num_workers, "chief": trainer.topology.is_chief}
    print(json.dumps({"digest": digest(trainer), "eval": eval_losses, "numbers": metrics, **role}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
