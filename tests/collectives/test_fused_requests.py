"""Fused requests: tensors are paired by name and order, even if ranks fuse them differently."""

import numpy as np
from ctl.collectives import settings
from ctl.collectives.frames import Inbox
from ctl.collectives.negotiation import Negotiation
from ctl.collectives.requests import Request
from ctl.collectives.timeline import Timeline
from hypothesis import given
from hypothesis import strategies as st


def requests_of_rank(rank, composition, first_id):
    """Returns the requests of one rank for tensors "0", "1", ... A list of several names is fused."""
    requests, number = [], first_id
    for names in composition:
        fused = {"names": list(names)} if len(names) > 1 else {}
        shapes = [[1]] * len(names)
        name = ", ".join(names)
        requests.append(
            Request(number, name, "allreduce", ["float32"] * len(names), shapes, is_inline=True, **fused)
        )
        number += 1 + len(names)
    return requests


def compositions(names):
    """Returns the strategy of all partitions of the ordered names into lists."""
    cuts = st.lists(st.booleans(), min_size=len(names) - 1, max_size=len(names) - 1)

    def cut(is_cut):
        parts = [[names[0]]]
        for name, is_new in zip(names[1:], is_cut, strict=True):
            parts.append([name]) if is_new else parts[-1].append(name)
        return parts

    return cuts.map(cut)


STEPS, NAMES = 3, [str(i) for i in range(5)]


@given(st.lists(st.tuples(compositions(NAMES), compositions(NAMES)), min_size=STEPS, max_size=STEPS),
       st.lists(st.integers(0, 1), max_size=40))  # fmt: skip
def test_each_tensor_is_paired_by_name_for_every_fusion(steps, order):
    chosen = settings.read_settings({"CTL_COLLECTIVE_AGREEMENT": "each_call"})
    negotiation = Negotiation(2, chosen, Timeline())
    pending_by_rank = {}
    for rank in (0, 1):
        pending = [
            (step, request)
            for step, both in enumerate(steps)
            for request in requests_of_rank(rank, both[rank], 100 * step)
        ]
        pending_by_rank[rank] = pending
    for rank in [*order, *[0] * 15, *[1] * 15]:
        if not pending_by_rank[rank]:
            continue
        step, request = pending_by_rank[rank].pop(0)
        values = [100 * (rank + 1) + 10 * step + int(n) for n in request.names or [request.name]]
        negotiation.add_request(rank, request, np.array(values, np.float32).tobytes())
        negotiation.send_responses()
    for rank in (0, 1):
        inbox, result_by_name, parts = Inbox(), {}, {}
        for part in negotiation.outboxes[rank]._parts:
            inbox._bytes += bytes(part)
        request_by_id = {
            r.id: r for s, both in enumerate(steps) for r in requests_of_rank(rank, both[rank], 100 * s)
        }
        for header, payload in inbox.messages():
            if header["type"] == "split":
                parts.update({part.id: part for part in request_by_id[header["id"]].parts()})
                continue
            assert header["type"] == "result", header
            request = parts.get(header["id"]) or request_by_id[header["id"]]
            names, values = request.names or [request.name], np.frombuffer(payload, np.float32)
            for name, value in zip(names, values, strict=True):
                result_by_name[header["id"] // 100, name] = value
        assert result_by_name == {(s, n): 300 + 20 * s + 2 * int(n) for s in range(STEPS) for n in NAMES}
    assert not negotiation._table.list_incomplete() and not negotiation._table._rounds_by_member
