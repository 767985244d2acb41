"""Places of the handshakes of a listener."""

import resource

import pytest
from ctl.io.handshake_limit import MIN_HANDSHAKE_SECS, HandshakeLimit


def full_limit(count=8):
    """Returns a limit without a free place. The handshakes start at 0.0, 0.01 ... and are their numbers."""
    limit = HandshakeLimit(count)
    for number in range(count):
        assert limit.has_place(number / 100) and limit.add(number, number / 100) is None
    return limit


def test_a_caller_waits_until_a_handshake_ends():
    limit = full_limit()
    assert not limit.has_place(0.2) and len(limit) == 8
    limit.remove(3)
    assert limit.has_place(0.2) and limit.add("next", 0.2) is None
    assert not limit.has_place(0.2)


def test_a_handshake_that_lasts_long_gives_its_place_to_the_next_caller():
    limit = full_limit()
    assert not limit.has_place(MIN_HANDSHAKE_SECS - 0.001)
    assert limit.has_place(MIN_HANDSHAKE_SECS)
    assert limit.add("next", MIN_HANDSHAKE_SECS) == limit.oldest == 0
    limit.remove(0)
    assert len(limit) == 8 and not limit.has_place(MIN_HANDSHAKE_SECS)
    assert limit.list_overdue(5.02, 5.0) == [1, 2]


def test_without_a_free_file_a_caller_waits_although_there_are_places():
    limit = HandshakeLimit(8)
    limit.pause()
    assert limit.has_place(0.0)  # no handshake would end the pause
    limit.add("first", 0.0)
    limit.add("second", 0.0)
    limit.pause()
    assert not limit.has_place(0.1)
    limit.remove("first")
    assert limit.has_place(0.1)


@pytest.mark.parametrize(("num_files", "expected"), [(1024, 256), (400, 100), (20, 8), (-1, 256)])
def test_at_most_a_quarter_of_the_files_is_used(monkeypatch, num_files, expected):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (num_files, num_files))
    limit = HandshakeLimit(256)
    while limit.has_place(0.0):
        limit.add(len(limit), 0.0)
    assert len(limit) == expected
