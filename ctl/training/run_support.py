"""What surrounds the steps of a run: who watches them, who writes checkpoints, what errors become."""

import contextlib
import logging
from collections.abc import Iterator

from ctl.callbacks.schedule import Action, combined
from ctl.checkpoints import saving as checkpoint_saving
from ctl.distribute import parameter_servers
from ctl.distribute.keras_objects import attribute, plain
from ctl.errors import Stopped
from ctl.metrics.group import WriterGroup
from ctl.metrics.protocol import Saved
from ctl.supervision import heartbeat, signals
from ctl.training import error_translation
from ctl.training.loop import GraphLoop, TrainLoop
from ctl.training.session import Session
from ctl.training.step_profiler import StepProfiler
from ctl.training.stragglers import Stragglers
from ctl.training.trainer_protocol import TrainerProtocol

_log = logging.getLogger("ctl")


def watched(trainer: TrainerProtocol, session: Session) -> contextlib.AbstractContextManager[None]:
    """Somebody looks whether steps go on; those within a long graph call count."""
    heartbeat.current.record_step(session.step)
    served = parameter_servers.is_used(trainer.strategy)
    look = None if served else lambda: int(session.state.step.numpy())
    return heartbeat.current.supervise_training(trainer.step_timeout_secs, look)


def saving(session: Session, writers: WriterGroup) -> contextlib.AbstractContextManager[None]:
    """The manager tidies up before the steps, and has written everything after them."""
    if session.lease is not None:
        session.manager.fence(session.lease.check_now)

    def told(step: int, path: str) -> None:
        session.saved = step
        writers.note(Saved(step, path))

    return checkpoint_saving.opened_manager(session.manager, session.state, told)


def requested_actions(session: Session, profiler: StepProfiler) -> Action:
    """Returns the actions requested by `Trainer.save` and `ctl profile` since the last call."""
    requested, session.save_asked = session.save_asked, False
    due = {Action.SAVE: requested, Action.PROFILE: profiler.is_due()}
    return combined(action for action, is_due in due.items() if is_due)


def notify_begin(session: Session, step: int, total: int | None) -> None:
    """Notifies the callbacks that training steps follow `step`, unless it is the last one."""
    if step != total:
        session.callbacks.tell("on_begin", step, step, "train")


def stragglers_of(trainer: TrainerProtocol, session: Session) -> Stragglers | None:
    """What compares the workers in step, if there are several."""
    times, place = session.step_times, trainer.topology
    return (
        None
        if times is None or place.num_workers == 1
        else Stragglers(times.total, place.workers, place.worker_index)
    )


class UpdateCheck:
    """A warning, once, about a step that neither calls `minimize` nor applies `self.optimizer` itself."""

    def __init__(self, trainer: TrainerProtocol, graph_loop: GraphLoop):
        self._trainer, self._graph_loop = trainer, graph_loop
        self._is_pending = trainer.optimizer is not None and trainer.topology.is_chief
        self._iterations_before = self._iterations()

    def after_steps(self) -> None:
        """Warns if steps have run and none of them has updated anything."""
        if not self._is_pending:
            return
        self._is_pending = False
        if self._graph_loop.calls_minimize:
            return
        iterations = self._iterations()
        if iterations is None or iterations == self._iterations_before:
            _log.warning(
                "train_step of %s does not call self.minimize(loss, tape): self.optimizer applies no "
                "update, and the weights stay as they are. Call self.minimize in train_step, or do not "
                "set self.optimizer.",
                type(self._trainer).__name__,
            )

    def _iterations(self) -> int | None:
        """Returns how many updates `self.optimizer` has applied, or None if it does not count them."""
        iterations = attribute(self._trainer.optimizer, "iterations")
        return None if iterations is None else int(plain(iterations).numpy())


@contextlib.contextmanager
def closing(loop: TrainLoop, profiler: StepProfiler) -> Iterator[None]:
    """Around the steps: a trace that has begun is written, however they end."""
    try:
        yield
    finally:
        profiler.close()
        if loop.trace is not None:
            loop.trace.close()


def exported(trainer: TrainerProtocol, session: Session, formats: tuple) -> list[str]:
    """Writes the model at the end of a run, while model_dir is this run's; returns the paths."""
    if session.lease is not None:
        session.lease.check_now()
    return trainer.export(*formats) if formats else []


def stopped(trainer: TrainerProtocol, step: int, signal: int) -> Stopped:
    """What a run ends with after a signal."""
    after = "; the same command goes on from there." if trainer.model_dir else "."
    return Stopped(
        f"Stopped by {signals.signal_name(signal)} at step {step}{after}", signals.exit_code(signal)
    )


def error_to_raise(error: BaseException, trainer: TrainerProtocol, session: Session) -> BaseException:
    """The error to raise for `error`, which ended a run; often the same."""
    topology = trainer.topology
    return error_translation.explained(
        error,
        step=session.step,
        manager=session.manager,
        batch_size=trainer.global_batch_size,
        topology=topology,
        several=topology.num_workers > 1 or parameter_servers.is_used(trainer.strategy),
    )
