"""Observers of the training loop of a trainer."""

from ctl.metrics.group import WriterGroup
from ctl.training.observers import (
    HeartbeatObserver,
    LeaseObserver,
    LoopObserver,
    ObserverGroup,
    ProgressObserver,
)
from ctl.training.session import Session
from ctl.training.step_profiler import StepProfiler, new_trace
from ctl.training.stragglers import Stragglers
from ctl.training.trainer_protocol import TrainerProtocol


def create_observers(
    trainer: TrainerProtocol, session: Session, writers: WriterGroup, profiler: StepProfiler
) -> ObserverGroup:
    """Creates the observers of a run, in the order of their calls."""
    timer, topology = session.step_times, trainer.topology
    observers: list[LoopObserver] = [
        LeaseObserver(session.check_lease),
        ProgressObserver(writers),
        HeartbeatObserver(),
        profiler,
    ]
    if timer is not None and topology.num_workers > 1:
        observers.append(Stragglers(timer.total, topology.workers, topology.worker_index))
    if (trace := new_trace(trainer, trainer.config.profile)) is not None:
        observers.append(trace)
    return ObserverGroup(observers)
