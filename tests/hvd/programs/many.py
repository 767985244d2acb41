"""Many ranks, as specified by the command line, with ordered numbers and equal sums."""

import json

import ctl.hvd as hvd
import numpy as np
import tensorflow as tf

hvd.init()
ranks, own_rank = hvd.size(), hvd.rank()
assert hvd.allgather(tf.constant([own_rank])).numpy().tolist() == list(range(ranks))
assert hvd.allgather_object(f"rank {own_rank}") == [f"rank {i}" for i in range(ranks)]
uneven = hvd.allgather(tf.repeat(tf.constant([own_rank]), own_rank % 3)).numpy().tolist()
assert uneven == [i for i in range(ranks) for _ in range(i % 3)]
received, rows = hvd.alltoall(tf.range(ranks) + 100 * own_rank, splits=[1] * ranks)
assert received.numpy().tolist() == [100 * i + own_rank for i in range(ranks)]
assert hvd.broadcast(tf.constant(own_rank), ranks - 1) == ranks - 1
for size in (3, 200_000):
    parts = np.stack([np.random.default_rng(i).normal(size=size).astype(np.float32) for i in range(ranks)])
    total = hvd.allreduce(tf.constant(parts[own_rank]), op=hvd.Sum).numpy()
    np.testing.assert_allclose(total, parts.sum(0), rtol=1e-4, atol=1e-4)
    share = hvd.reducescatter(tf.constant(parts[own_rank]), op=hvd.Sum).numpy()
    bounds = np.cumsum([0] + [size // ranks + (i < size % ranks) for i in range(ranks)])
    np.testing.assert_allclose(
        share, parts.sum(0)[bounds[own_rank] : bounds[own_rank + 1]], rtol=1e-4, atol=1e-4
    )
    bits = hvd.allgather(tf.constant([int(np.frombuffer(total.tobytes(), np.uint8).sum())]))
    assert len(set(bits.numpy().tolist())) == 1
odd_ranks = [r for r in range(ranks) if r % 2]
process_set = hvd.ProcessSet(odd_ranks)
hvd.init(process_sets=[process_set])
if process_set.included():
    assert hvd.allreduce(tf.constant(own_rank), op=hvd.Sum, process_set=process_set) == sum(odd_ranks)
print(json.dumps({"rank": own_rank}))
