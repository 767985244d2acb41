"""Observers of the training loop of a trainer. One line registers an optional observer."""

import contextlib
import pkgutil
from collections.abc import Callable

import tensorflow as tf
from ctl.checkpoints.protocol import Manifest
from ctl.data.batches import Batches
from ctl.metrics.group import WriterGroup
from ctl.profiling.loop_observer import LoopObserver, ObserverInputs
from ctl.profiling.step_profiler import ProfiledRun, StepProfiler
from ctl.supervision import heartbeat
from ctl.training.loop import GraphLoop
from ctl.training.observers import HeartbeatObserver, LeaseObserver, ObserverGroup, ProgressObserver
from ctl.training.prepared import PreparedTrainer
from ctl.training.run_options import RunOptions
from ctl.training.update_check import UpdateCheck

# functions that return an observer, or None if the settings do not request it
OPTIONAL = (
    "ctl.profiling.stragglers:create_stragglers",
    "ctl.profiling.trace_window:create_trace",
    "ctl.elastic.observer:create_observer",
)  # fmt: skip


def create_profiler(prepared: PreparedTrainer, options: RunOptions, writers: WriterGroup) -> StepProfiler:
    """Creates the observer for `ctl profile`."""
    run = ProfiledRun(
        model=prepared.task.class_name,
        config=prepared.config,
        gradients=prepared.task.gradients,
        world=prepared.world,
        writers=writers,
        timer=prepared.programs.timer,
        log_dir=options.log_dir,
        save_every=options.intervals.save if prepared.checkpointing.can_save else None,
        is_first=not prepared.activity.has_profiled,
        on_report=prepared.activity.record_profile,
    )
    return StepProfiler(run)


def create_observers(
    prepared: PreparedTrainer,
    graph_loop: GraphLoop,
    batches: Batches,
    profiler: StepProfiler,
    writers: WriterGroup,
    log_dir: str,
    check_lease: Callable[[], None],
    manifest: Callable[[int], Manifest],
) -> ObserverGroup:
    """Creates the observers of a run, in the order of their calls."""
    world, timer = prepared.world, prepared.programs.timer
    observers: list[LoopObserver] = [
        LeaseObserver(check_lease),
        ProgressObserver(writers),
        HeartbeatObserver(),
        UpdateCheck(prepared.task, graph_loop, is_chief=world.topology.is_chief),
        profiler,
    ]
    run_no_step = lambda: graph_loop.run(batches, 0, tf.zeros([0, 2], tf.float64))  # noqa: E731
    inputs = ObserverInputs(prepared.config, world, timer, writers, log_dir, manifest, run_no_step)
    optional = [pkgutil.resolve_name(name)(inputs) for name in OPTIONAL]
    return ObserverGroup([*observers, *(observer for observer in optional if observer is not None)])


def watch_progress(prepared: PreparedTrainer) -> contextlib.AbstractContextManager[None]:
    """Starts the hang detector for a block. It polls the step variable, also within a graph call."""
    heartbeat.current.record_step(prepared.step)
    # a poll of a variable on a parameter server would wait for the server
    is_local = not prepared.world.is_asynchronous
    read_step = (lambda: int(prepared.state.step.numpy())) if is_local else None
    return heartbeat.current.supervise_training(prepared.config.step_timeout_secs, read_step)
