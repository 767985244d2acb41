"""Processes with threads, on machines with few cores, in virtual time.

    clock = VirtualClock()
    process = Process(clock, Machine(clock, cores=2))

    def thread():
        yield process.compute(0.001)          # waits for a core
        yield clock.sleep(0.5)
        reply = yield mailbox.receive(5.0)    # None after the timeout

    clock.start(thread())
    clock.run()

A thread is a generator. It yields a *wait*: a function of a callback, which gets the result of the wait. A
process computes one thing at a time, as Python's lock requires. A machine executes the requests of its
processes in their order; none is interrupted.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

Wait = Callable[[Callable[[Any], None]], None]


class VirtualClock:
    """Events in the order of their virtual time.

    Attributes:
      now_secs: Virtual time (seconds).
    """

    def __init__(self) -> None:
        self.now_secs = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def call_after(self, secs: float, call: Callable[[], None]) -> None:
        """Calls a function after `secs` seconds."""
        heapq.heappush(self._events, (self.now_secs + secs, next(self._numbers), call))

    def sleep(self, secs: float) -> Wait:
        """Returns a wait of `secs` seconds."""
        return lambda resume: self.call_after(secs, lambda: resume(None))

    def start(self, thread: Generator[Wait, Any, None]) -> None:
        """Starts a thread."""

        def resume(value: Any) -> None:
            try:
                wait = thread.send(value)
            except StopIteration:
                return
            wait(resume)

        self.call_after(0.0, lambda: resume(None))

    def run(self, until_secs: float) -> None:
        """Executes all events until a time (seconds)."""
        while self._events and self._events[0][0] <= until_secs:
            self.now_secs, _, call = heapq.heappop(self._events)
            call()


class Machine:
    """The cores of a machine.

    Args:
      clock: Clock of the simulation.
      cores: Number of cores.
    """

    def __init__(self, clock: VirtualClock, cores: int):
        self._clock, self._num_free = clock, cores
        self._requests: deque[tuple[float, Callable[[], None]]] = deque()

    def execute(self, secs: float, callback: Callable[[], None]) -> None:
        """Occupies a core for `secs` seconds, when one is free."""
        self._requests.append((secs, callback))
        self._occupy_cores()

    def _occupy_cores(self) -> None:
        while self._num_free and self._requests:
            self._num_free -= 1
            secs, callback = self._requests.popleft()
            self._clock.call_after(secs, lambda callback=callback: self._release(callback))

    def _release(self, callback: Callable[[], None]) -> None:
        self._num_free += 1
        callback()
        self._occupy_cores()


class Process:
    """A process, which computes one thing at a time.

    Args:
      clock: Clock of the simulation.
      machine: Machine of the process.
      slowdown: Factor of its CPU time.

    Attributes:
      cpu_secs: CPU time up to now.
    """

    def __init__(self, clock: VirtualClock, machine: Machine, slowdown: float = 1.0):
        self._clock, self._machine, self._slowdown = clock, machine, slowdown
        self._requests: deque[tuple[float, Callable[[Any], None]]] = deque()
        self._is_busy = False
        self.cpu_secs = 0.0

    def compute(self, secs: float) -> Wait:
        """Returns a wait until `secs` seconds of CPU time have been spent."""

        def wait(resume: Callable[[Any], None]) -> None:
            self._requests.append((secs * self._slowdown, resume))
            if not self._is_busy:
                self._execute_next()

        return wait

    def _execute_next(self) -> None:
        self._is_busy = bool(self._requests)
        if self._requests:
            secs, resume = self._requests.popleft()
            self.cpu_secs += secs
            self._machine.execute(secs, lambda: self._end(resume))

    def _end(self, resume: Callable[[Any], None]) -> None:
        resume(None)
        self._execute_next()


class Mailbox:
    """Queue of messages to one thread.

    Args:
      clock: Clock of the simulation.
    """

    def __init__(self, clock: VirtualClock):
        self._clock = clock
        self._messages: deque[Any] = deque()
        self._num_waits = 0
        self._resume: Callable[[Any], None] | None = None

    def put(self, message: Any) -> None:
        """Adds a message, which must not be None."""
        self._messages.append(message)
        self._deliver()

    def receive(self, timeout_secs: float) -> Wait:
        """Returns a wait for the next message. Its result is None after the timeout."""

        def wait(resume: Callable[[Any], None]) -> None:
            self._num_waits += 1
            self._resume, number = resume, self._num_waits
            if self._messages:
                self._deliver()
            else:
                self._clock.call_after(timeout_secs, lambda: self._expire(number))

        return wait

    def _deliver(self) -> None:
        if self._messages and self._resume is not None:
            resume, self._resume = self._resume, None
            message = self._messages.popleft()
            self._clock.call_after(0.0, lambda: resume(message))

    def _expire(self, number: int) -> None:
        if self._num_waits == number and self._resume is not None:
            resume, self._resume = self._resume, None
            resume(None)
