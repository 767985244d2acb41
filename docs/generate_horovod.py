"""Writes the notes on Horovod's API into docs/horovod.md; tests/hvd/test_hvd_api.py checks each row.

python docs/generate_horovod.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("horovod.md")
BEGIN, END = "<!-- api: written by docs/generate_horovod.py -->", "<!-- end of the api -->"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> None:
    from hvd import hvd_api

    text = PAGE.read_text(encoding="utf-8")
    before, remainder = text.split(BEGIN)
    after = remainder.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{hvd_api.table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
