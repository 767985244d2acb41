"""Synthetic choices of users among items, drawn from latent preferences and reproducible by seed."""

import numpy as np

TASTES, CHOSEN, OTHERS, RANKED = 6, 12, 8, 100


def load(users: int = 5000, items: int = 2000, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Returns {"train", "test"} -> names: "user" `[n]`, chosen "item" `[n]`, "others" `[n, k]` not chosen.

    One of the 12 items of a user is for tests, to be ranked among 99 items that the user did not choose.
    Each of the 11 training items has 8 such items. Choices depend on preferences and item popularity.
    """
    random = np.random.default_rng(seed)
    wants = random.normal(size=(users, TASTES)).astype(np.float32)
    offers = random.normal(size=(items, TASTES)).astype(np.float32)
    popularity = random.normal(size=items).astype(np.float32)
    appeal = wants @ offers.T + popularity + random.gumbel(size=(users, items)).astype(np.float32)
    chosen = np.argpartition(-appeal, CHOSEN, axis=1)[:, :CHOSEN]
    chosen = random.permuted(chosen, axis=1)
    person = np.repeat(np.arange(users), CHOSEN - 1)
    return {
        "train": _named(person, chosen[:, 1:].reshape(-1), _others(person, chosen, OTHERS, items, random)),
        "test": _named(
            np.arange(users),
            chosen[:, 0],
            _others(np.arange(users), chosen, RANKED - 1, items, random),
        ),
    }


def _others(person: np.ndarray, chosen: np.ndarray, count: int, items: int, random: np.random.Generator):
    """Returns `[n, count]` items that the person did not choose."""
    found = random.integers(items, size=(len(person), count))
    while True:
        bad = (found[:, :, None] == chosen[person][:, None, :]).any(axis=2)
        if not bad.any():
            return found
        found[bad] = random.integers(items, size=int(bad.sum()))


def _named(person: np.ndarray, item: np.ndarray, others: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "user": np.char.add("user-", person.astype("U")).astype("S"),
        "item": np.char.add("item-", item.astype("U")).astype("S"),
        "others": np.char.add("item-", others.astype("U")).astype("S"),
    }
