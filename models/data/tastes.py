"""Synthetic choices of users among items, drawn from latent preferences and reproducible by seed."""

import numpy as np

TASTES, CHOSEN, NEGATIVES, RANKED = 6, 12, 8, 100


def load(users: int = 5000, items: int = 2000, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Returns {"train", "test"} -> names: "user" `[n]`, chosen "item" `[n]`, other "negatives" `[n, k]`.

    One of the 12 items of a user is for tests, to be ranked among 99 items that the user did not choose.
    Each of the 11 training items has 8 such items. Choices depend on preferences and item popularity.
    """
    random = np.random.default_rng(seed)
    user_tastes = random.normal(size=(users, TASTES)).astype(np.float32)
    item_tastes = random.normal(size=(items, TASTES)).astype(np.float32)
    popularity = random.normal(size=items).astype(np.float32)
    noise = random.gumbel(size=(users, items)).astype(np.float32)
    utility = user_tastes @ item_tastes.T + popularity + noise
    chosen = np.argpartition(-utility, CHOSEN, axis=1)[:, :CHOSEN]
    chosen = random.permuted(chosen, axis=1)
    user, test_user = np.repeat(np.arange(users), CHOSEN - 1), np.arange(users)
    negatives = _sample_negatives(user, chosen, NEGATIVES, items, random)
    test_negatives = _sample_negatives(test_user, chosen, RANKED - 1, items, random)
    return {
        "train": _as_strings(user, chosen[:, 1:].reshape(-1), negatives),
        "test": _as_strings(test_user, chosen[:, 0], test_negatives),
    }


def _sample_negatives(
    user: np.ndarray, chosen: np.ndarray, count: int, items: int, random: np.random.Generator
):
    """Returns `[n, count]` items that the user did not choose."""
    negatives = random.integers(items, size=(len(user), count))
    while True:
        is_chosen = (negatives[:, :, None] == chosen[user][:, None, :]).any(axis=2)
        if not is_chosen.any():
            return negatives
        negatives[is_chosen] = random.integers(items, size=int(is_chosen.sum()))


def _as_strings(user: np.ndarray, item: np.ndarray, negatives: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "user": np.char.add("user-", user.astype("U")).astype("S"),
        "item": np.char.add("item-", item.astype("U")).astype("S"),
        "negatives": np.char.add("item-", negatives.astype("U")).astype("S"),
    }
