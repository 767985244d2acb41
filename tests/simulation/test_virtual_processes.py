"""Cores, threads and messages in virtual time."""

from virtual_processes import Machine, Mailbox, Process, VirtualClock


def run(clock, *threads):
    for thread in threads:
        clock.start(thread)
    clock.run(1e9)


def test_processes_share_the_cores_of_a_machine():
    clock, ended_at = VirtualClock(), []
    machine = Machine(clock, cores=2)

    def thread(secs, slowdown=1.0):
        yield Process(clock, machine, slowdown).compute(secs)
        ended_at.append(clock.now_secs)

    run(clock, thread(1.0), thread(3.0), thread(1.0), thread(0.5, slowdown=4.0))
    assert ended_at == [1.0, 2.0, 3.0, 4.0]


def test_threads_of_one_process_compute_one_after_the_other():
    clock, ended_at = VirtualClock(), []
    process = Process(clock, Machine(clock, cores=4))

    def thread():
        for _ in range(2):
            yield process.compute(1.0)
            ended_at.append(clock.now_secs)
            yield clock.sleep(0.25)

    run(clock, thread(), thread())
    assert ended_at == [1.0, 2.0, 3.0, 4.0] and process.cpu_secs == 4.0


def test_a_timeout_ends_its_own_wait_only():
    clock, received = VirtualClock(), []
    mailbox = Mailbox(clock)

    def receiver():
        for timeout_secs in (1.0, 5.0, 5.0, 1.0):
            received.append((yield mailbox.receive(timeout_secs)))
            received.append(clock.now_secs)

    def sender():
        yield clock.sleep(0.5)
        mailbox.put("first")  # the timeout of its wait is over at 1.0
        yield clock.sleep(1.5)
        mailbox.put("second")
        mailbox.put("third")

    run(clock, receiver(), sender())
    assert received == ["first", 0.5, "second", 2.0, "third", 2.0, None, 3.0]


def test_the_simulation_ends_at_its_time_limit():
    clock, ticks = VirtualClock(), []

    def thread():
        while True:
            yield clock.sleep(1.0)
            ticks.append(clock.now_secs)

    clock.start(thread())
    clock.run(3.5)
    assert ticks == [1.0, 2.0, 3.0]
