"""Two workers save, restore and predict by hand; argv[1] is a directory that both see."""

import json
import sys
from pathlib import Path

import ctl
from small_models import Small, digest, every_step, examples


class Saves(Small):
    def after_loop(self, step, means):
        if step == 2 and self.topology.is_chief:
            self.save()  # on one worker only: the chief's word counts for all


def main(where: Path) -> None:
    never = every_step(log=ctl.Every(), save=ctl.Every())
    first = Saves(model_dir=where / "run", strategy="multi_worker", writers=[], intervals=never)
    first.train(4)
    first.model.layers[0].bias.assign(first.model.layers[0].bias + 1.0)
    path = first.save()
    second = Small(strategy=first.strategy, writers=[], intervals=never)
    step = second.restore(where / "run")
    names = sorted(p.name for p in (where / "run" / "checkpoints").iterdir() if p.name.startswith("ckpt"))
    rows = examples()[0][: 5 + first.topology.worker_index]  # each process predicts what it is given
    predicted = second.predict(rows)
    try:
        second.restore(where / "nothing")
    except ctl.CtlError as e:
        refused, code = str(e), e.exit_code
    print(json.dumps({
        "path": path, "step": step, "same": digest(first) == digest(second), "names": names,
        "digest": digest(second), "rows": len(predicted), "refused": refused, "code": code,
    }))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
