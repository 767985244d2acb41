"""Takes pictures of a run in TensorBoard, and fails if a page lacks data of the run.

    python docs/tensorboard_check.py MODEL_DIR PICTURES_FOLDER

Starts TensorBoard on MODEL_DIR/logs, or on the directory of a sweep, and a headless Chromium, opens Time
Series, Scalars, Custom Scalars, HParams, Text, Graphs, and Images, Histograms, Audio and PR Curves where
there are any, waits until the tags, runs, hyperparameters and cards that TensorBoard's server knows are on
the page, and saves one PNG per page. Needs the programs `chromium` and `chromedriver` (Debian: packages
chromium and chromium-driver). Everything stays on this machine.
"""

import argparse
import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WINDOW = (1400, 1600)  # pixels
START_TIMEOUT_SECS = 60.0
PAGE_TIMEOUT_SECS = 60.0
CHROMIUM_ARGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    f"--window-size={WINDOW[0]},{WINDOW[1]}",
)
# TensorBoard's pages are made of shadow roots and frames, which `innerText` does not enter.
VISIBLE_TEXT = """
const words = [];
const walk = (node) => {
  if (node.nodeType === Node.TEXT_NODE) words.push(node.textContent);
  if (node.tagName === 'STYLE' || node.tagName === 'SCRIPT') return;
  if (node.tagName === 'IFRAME' && node.contentDocument) walk(node.contentDocument);
  if (node.shadowRoot) walk(node.shadowRoot);
  node.childNodes.forEach(walk);
};
walk(document.body);
return words.join(' ').replace(/\\s+/g, ' ');
"""
# Time Series opens only the first two groups of tags.
OPEN_ALL_GROUPS = """
document.querySelectorAll('button.group-toolbar mat-icon[svgicon=expand_more_24px]')
  .forEach(icon => icon.closest('button').click());
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("pictures", type=Path)
    options = parser.parse_args()
    logs = options.model_dir / "logs"
    if (options.model_dir / "sweep.json").is_file():
        logs = options.model_dir
    if not logs.is_dir():
        print(
            f"{logs} is no folder; give the model_dir of a run that wrote TensorBoard logs",
            file=sys.stderr,
        )
        return 2
    options.pictures.mkdir(parents=True, exist_ok=True)
    missing = []
    with tensorboard_server(logs) as server, browser() as session:
        for page, expected in what_pages_show(server).items():
            lacking = take_picture(
                session, f"{server}/#{page}", expected, options.pictures / f"{page}.png"
            )
            missing += [f"{page}: {text!r} is not shown" for text in lacking]
            print(f"{page}: {len(expected) - len(lacking)} of {len(expected)} things shown")
    print("\n".join(missing))
    return 1 if missing else 0


def what_pages_show(server: str) -> dict[str, list[str]]:
    """Returns page -> texts that it must show, according to the server."""

    def data(path: str, body: Any = None) -> Any:
        return call(f"{server}/data/{path}", body)

    # The server answers before it has read the files.
    runs = wait_for(lambda: data("plugin/scalars/tags"), "runs in TensorBoard", START_TIMEOUT_SECS)
    tags = sorted({tag for run in runs.values() for tag in run})
    scalars = [*sorted(runs), *tags]
    pages = {"timeseries": scalars, "scalars": scalars}
    request = {
        "startIndex": 0,
        "sliceSize": 10,
        "colParams": [],
        "allowedStatuses": [f"STATUS_{s}" for s in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")],
    }
    groups = data("plugin/hparams/session_groups", request).get("sessionGroups", [])
    if groups:
        metrics = {metric["name"]["tag"] for g in groups for metric in g.get("metricValues", [])}
        pages["hparams"] = [*(name for g in groups for name in g["hparams"]), *sorted(metrics)]
    texts = data("plugin/text/tags")
    if texts:
        pages["text"] = sorted({tag for tags in texts.values() for tag in tags})
    for plugin in ("images", "histograms", "audio", "pr_curves"):
        tagged = data(f"plugin/{plugin}/tags")
        tags = {tag.removesuffix("/pr_curves") for tags in tagged.values() for tag in tags}
        if tags:
            pages[plugin] = sorted(tags)
    groups = data("plugin/custom_scalars/layout").get("category", [])
    if groups:
        charts = [chart["title"] for group in groups for chart in group["chart"]]
        pages["custom_scalars"] = [*(group["title"] for group in groups), *charts]
    if data("plugin/graphs/info"):
        pages["graphs"] = ["train"]
    return pages


def take_picture(session: str, url: str, expected: list[str], path: Path) -> list[str]:
    """Saves the page as PNG once everything expected is on it; returns the missing texts."""
    call(f"{session}/url", {"url": "about:blank"})  # a change after "#" alone does not load a page
    call(f"{session}/url", {"url": url})
    lacking = expected

    def complete() -> bool:
        nonlocal lacking
        text = call(f"{session}/execute/sync", {"script": VISIBLE_TEXT, "args": []})["value"]
        lacking = [item for item in expected if item not in text]
        return not lacking

    with contextlib.suppress(TimeoutError):
        wait_for(complete, url, PAGE_TIMEOUT_SECS)
    call(f"{session}/execute/sync", {"script": OPEN_ALL_GROUPS, "args": []})
    time.sleep(3.0)  # curves are drawn, and stop moving, after their titles
    path.write_bytes(base64.b64decode(call(f"{session}/screenshot")["value"]))
    return lacking


@contextlib.contextmanager
def tensorboard_server(logs: Path) -> Iterator[str]:
    """Yields its address; the process ends with the block."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(logs),
        "--host",
        "localhost",
        "--port",
        str(port),
    ]
    address = f"http://localhost:{port}"
    with running(command):
        wait_for(lambda: call(f"{address}/data/environment"), address, START_TIMEOUT_SECS)
        yield address


@contextlib.contextmanager
def browser() -> Iterator[str]:
    """Yields the address of a WebDriver session; browser and driver end with the block."""
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        raise SystemExit("chromium and chromedriver are needed: install chromium, chromium-driver")
    port = free_port()
    address = f"http://localhost:{port}"
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        running([driver, f"--port={port}"]),
    ):
        wait_for(lambda: call(f"{address}/status")["value"]["ready"], driver, START_TIMEOUT_SECS)
        options = {"binary": chromium, "args": [*CHROMIUM_ARGS, f"--user-data-dir={profile}"]}
        request = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        session_id = call(f"{address}/session", request)["value"]["sessionId"]
        session = f"{address}/session/{session_id}"
        try:
            yield session
        finally:
            call(session, method="DELETE")


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[None]:
    """A process that is gone after the block."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def call(url: str, body: Any = None, method: str | None = None) -> Any:
    """The JSON that a local server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=PAGE_TIMEOUT_SECS) as answer:
        return json.load(answer)


def wait_for(attempt: Callable[[], Any], subject: str, timeout_secs: float) -> Any:
    """Returns the first true result of `attempt`. Raises TimeoutError if there is none in time."""
    give_up = time.monotonic() + timeout_secs
    while time.monotonic() < give_up:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            answer = attempt()
            if answer:
                return answer
        time.sleep(0.2)
    raise TimeoutError(f"{subject}: no result within {timeout_secs:g} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
