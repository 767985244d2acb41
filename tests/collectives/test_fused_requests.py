"""Ranks that join their tensors otherwise: each tensor is paired by its own name and order."""

import numpy as np
from ctl.collectives import settings
from ctl.collectives.frames import Inbox
from ctl.collectives.negotiation import Negotiation
from ctl.collectives.requests import Request
from ctl.collectives.timeline import Timeline
from hypothesis import given
from hypothesis import strategies as st


def asked_by(rank, composition, first_id):
    """Requests of one rank for tensors "0", "1", ...; those of a list of several go together."""
    requests_of, number = [], first_id
    for names in composition:
        many = {"names": list(names)} if len(names) > 1 else {}
        shapes = [[1]] * len(names)
        name = ", ".join(names)
        requests_of.append(
            Request(number, name, "allreduce", ["float32"] * len(names), shapes, is_inline=True, **many)
        )
        number += 1 + len(names)
    return requests_of


def compositions(names):
    """How names in order can be cut into lists."""
    cuts = st.lists(st.booleans(), min_size=len(names) - 1, max_size=len(names) - 1)

    def cut(where):
        found = [[names[0]]]
        for name, is_new in zip(names[1:], where, strict=True):
            found.append([name]) if is_new else found[-1].append(name)
        return found

    return cuts.map(cut)


STEPS, NAMES = 3, [str(i) for i in range(5)]


@given(st.lists(st.tuples(compositions(NAMES), compositions(NAMES)), min_size=STEPS, max_size=STEPS),
       st.lists(st.integers(0, 1), max_size=40))  # fmt: skip
def test_each_tensor_meets_its_own_however_ranks_join_them(steps, order):
    negotiation = Negotiation(2, settings.read_settings({}), Timeline())
    left = {}
    for rank in (0, 1):
        asked = [
            (step, request)
            for step, both in enumerate(steps)
            for request in asked_by(rank, both[rank], 100 * step)
        ]
        left[rank] = asked
    for rank in [*order, *[0] * 15, *[1] * 15]:
        if not left[rank]:
            continue
        step, request = left[rank].pop(0)
        values = [100 * (rank + 1) + 10 * step + int(n) for n in request.names or [request.name]]
        negotiation.add_request(rank, request, np.array(values, np.float32).tobytes())
        negotiation.send_responses()
    for rank in (0, 1):
        inbox, found, parts = Inbox(), {}, {}
        for part in negotiation.outboxes[rank]._parts:
            inbox._bytes += bytes(part)
        asked = {r.id: r for s, both in enumerate(steps) for r in asked_by(rank, both[rank], 100 * s)}
        for header, payload in inbox.messages():
            if header["type"] == "split":
                parts.update({part.id: part for part in asked[header["id"]].parts()})
                continue
            assert header["type"] == "result", header
            request = parts.get(header["id"]) or asked[header["id"]]
            names, values = request.names or [request.name], np.frombuffer(payload, np.float32)
            for name, value in zip(names, values, strict=True):
                found[header["id"] // 100, name] = value
        assert found == {(s, n): 300 + 20 * s + 2 * int(n) for s in range(STEPS) for n in NAMES}
    assert not negotiation._table.list_incomplete() and not negotiation._table._rounds_by_member
