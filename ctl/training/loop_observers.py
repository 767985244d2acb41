"""Observers of the training loop of a trainer."""

import contextlib

from ctl.distribute import parameter_servers
from ctl.metrics.group import WriterGroup
from ctl.supervision import heartbeat
from ctl.training.loop import GraphLoop
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
from ctl.training.update_check import UpdateCheck


def create_observers(
    trainer: TrainerProtocol,
    session: Session,
    writers: WriterGroup,
    graph_loop: GraphLoop,
    profiler: StepProfiler,
) -> ObserverGroup:
    """Creates the observers of a run, in the order of their calls."""
    timer, topology = session.step_times, trainer.topology
    observers: list[LoopObserver] = [
        LeaseObserver(session.check_lease),
        ProgressObserver(writers),
        HeartbeatObserver(),
        UpdateCheck(trainer, graph_loop),
        profiler,
    ]
    if timer is not None and topology.num_workers > 1:
        observers.append(Stragglers(timer.total, topology.workers, topology.worker_index))
    if (trace := new_trace(trainer, trainer.config.profile)) is not None:
        observers.append(trace)
    return ObserverGroup(observers)


def watch_progress(trainer: TrainerProtocol, session: Session) -> contextlib.AbstractContextManager[None]:
    """Starts the hang detector for a block. It polls the step variable, also within a graph call."""
    heartbeat.current.record_step(session.step)
    has_servers = parameter_servers.is_used(trainer.strategy)  # which a poll would wait for
    read_step = None if has_servers else lambda: int(session.state.step.numpy())
    return heartbeat.current.supervise_training(trainer.step_timeout_secs, read_step)
