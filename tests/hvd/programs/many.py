"""Many ranks, as specified by the command line, with ordered numbers and equal sums."""

import json

import ctl.hvd as hvd
import numpy as np
import tensorflow as tf

hvd.init()
ranks, me = hvd.size(), hvd.rank()
assert hvd.allgather(tf.constant([me])).numpy().tolist() == list(range(ranks))
assert hvd.allgather_object(f"rank {me}") == [f"rank {i}" for i in range(ranks)]
uneven = hvd.allgather(tf.repeat(tf.constant([me]), me % 3)).numpy().tolist()
assert uneven == [i for i in range(ranks) for _ in range(i % 3)]
got, rows = hvd.alltoall(tf.range(ranks) + 100 * me, splits=[1] * ranks)
assert got.numpy().tolist() == [100 * i + me for i in range(ranks)]
assert hvd.broadcast(tf.constant(me), ranks - 1) == ranks - 1
for size in (3, 200_000):
    parts = np.stack([np.random.default_rng(i).normal(size=size).astype(np.float32) for i in range(ranks)])
    total = hvd.allreduce(tf.constant(parts[me]), op=hvd.Sum).numpy()
    np.testing.assert_allclose(total, parts.sum(0), rtol=1e-4, atol=1e-4)
    share = hvd.reducescatter(tf.constant(parts[me]), op=hvd.Sum).numpy()
    bounds = np.cumsum([0] + [size // ranks + (i < size % ranks) for i in range(ranks)])
    np.testing.assert_allclose(share, parts.sum(0)[bounds[me] : bounds[me + 1]], rtol=1e-4, atol=1e-4)
    bits = hvd.allgather(tf.constant([int(np.frombuffer(total.tobytes(), np.uint8).sum())]))
    assert len(set(bits.numpy().tolist())) == 1
everyone = [r for r in range(ranks) if r % 2]
odd = hvd.ProcessSet(everyone)
hvd.init(process_sets=[odd])
if odd.included():
    assert hvd.allreduce(tf.constant(me), op=hvd.Sum, process_set=odd) == sum(everyone)
print(json.dumps({"rank": me}))
