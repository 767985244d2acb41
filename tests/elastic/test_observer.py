"""When the observer of an elastic job takes snapshots, and when it ends the loop."""

import types

import pytest
from ctl.elastic.observer import SnapshotObserver
from ctl.elastic.recovery import WorkersChangeError


class Snapshots:
    """Snapshots that record their steps."""

    def __init__(self, has_shared=False):
        self.steps, self.confirmed, self.has_shared = [], [], has_shared

    def take(self, manifest):
        self.steps.append(manifest)

    def confirm(self):
        self.confirmed.append(self.steps[-1] if self.steps else None)


@pytest.fixture
def calls():
    return []


def observer_of(snapshots, calls, *, has_joined=True, size=2, will_change=False, rank=0):
    ranks = types.SimpleNamespace(rank=rank, size=size)
    group = types.SimpleNamespace(ranks=ranks, has_joined=has_joined, will_change=will_change)
    return SnapshotObserver(group, snapshots, lambda step: step, lambda: calls.append("compiled"))


def test_a_new_worker_compiles_its_step_before_it_joins(calls):
    snapshots = Snapshots()
    observer = observer_of(snapshots, calls, has_joined=False)
    with pytest.raises(WorkersChangeError):
        observer.around(0)
    assert calls == ["compiled"] and not snapshots.steps


@pytest.mark.parametrize("has_shared", [False, True])
def test_the_first_snapshot_is_that_of_the_agreement_if_there_was_one(calls, has_shared):
    snapshots = Snapshots(has_shared)
    observer = observer_of(snapshots, calls)
    for step in (5, 6):
        observer.around(step)
    assert snapshots.steps == ([] if has_shared else [5]) and not calls
    observer.take_sums([0.0, 1.0])
    observer.around(7)
    assert snapshots.steps[-1] == 7


def test_a_change_ends_the_loop_after_a_snapshot_of_all(calls):
    snapshots = Snapshots(has_shared=True)
    observer = observer_of(snapshots, calls)
    observer.take_sums([1.0, 0.0])
    with pytest.raises(WorkersChangeError):
        observer.around(9)
    assert snapshots.steps == [9] and snapshots.confirmed == [None]


def test_a_worker_that_is_alone_needs_no_vote(calls):
    snapshots = Snapshots(has_shared=True)
    observer = observer_of(snapshots, calls, size=1, will_change=True)
    with pytest.raises(WorkersChangeError):
        observer.around(4)
    assert snapshots.steps == [4]


@pytest.mark.parametrize(("rank", "is_due"), [(0, 1.0), (1, 0.0)])
def test_the_clock_of_the_chief_determines_snapshots(calls, rank, is_due):
    assert observer_of(Snapshots(), calls, rank=rank).values_to_sum() == [0.0, is_due]
