"""Takes the pictures of README.md from a real run: the console, and TensorBoard.

    python docs/generate_pictures.py            # writes docs/images/console.svg and tensorboard.png

Trains models.mnist in a terminal of 100 columns. The picture of TensorBoard needs Chromium, see
docs/tensorboard_check.py.
"""

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tensorboard_check
from PIL import Image
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
COMMAND = ["--train_steps=500", "--eval_every_steps=100", "--log_every_steps=20", "--export=keras"]
COLUMNS = 112


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder) / "mnist"
        arguments = ["-m", "models.mnist", f"--model_dir={model_dir}", *COMMAND]
        text = run_in_terminal([sys.executable, *arguments], folder)
        draw_console(text.replace(f"{folder}/", "/tmp/"))
        take_tensorboard_picture(model_dir / "logs", Path(folder) / "page.png")


def run_in_terminal(command: list[str], folder: str) -> str:
    """Runs a command in a terminal and returns the final content of the terminal."""
    head, tail = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    started = {"cwd": ROOT, "env": environ, "stdout": tail, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **started) as process:
        os.close(tail)
        parts = []
        while True:
            try:
                data = os.read(head, 65536)
            except OSError:
                break
            parts.append(data)
        os.close(head)
        if process.wait():
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return visible_lines(b"".join(parts).decode(errors="replace"))


def visible_lines(text: str) -> str:
    """Converts the output of a terminal to its visible lines: the bar replaces itself."""
    lines = [""]
    at = 0
    for part in re.split(r"(\x1b\[\d*A|\x1b\[2?K|\r\n|\r|\n)", text):
        if part in ("\r\n", "\n"):
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif re.fullmatch(r"\x1b\[\d*A", part):
            at = max(0, at - int(part[2:-1] or 1))
        elif part == "\r" or re.fullmatch(r"\x1b\[2?K", part):
            lines[at] = ""
        else:
            lines[at] += part
    return "\n".join(lines)


def draw_console(text: str) -> None:
    """Writes the picture of the console, without external fonts."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        command_line = f"$ python -m models.mnist --model_dir=/tmp/mnist {' '.join(COMMAND)}"
        console.print(command_line, highlight=False)
        console.print(Text.from_ansi(text.strip()))
    picture = console.export_svg(title="ctl", unique_id="ctl")
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    (IMAGES / "console.svg").write_text(picture)


def take_tensorboard_picture(logs: Path, page: Path) -> None:
    """Writes the picture of TensorBoard's charts."""
    with tensorboard_check.tensorboard_server(logs) as server, tensorboard_check.browser() as session:
        expected = tensorboard_check.what_pages_show(server)["custom_scalars"]
        tensorboard_check.take_picture(session, f"{server}/#custom_scalars", expected, page)
    image = Image.open(page).convert("RGB").crop((0, 0, 1400, 960))
    image.quantize(64).save(IMAGES / "tensorboard.png", optimize=True)


if __name__ == "__main__":
    main()
