#!/usr/bin/env python3
"""Stands in for ssh: writes down its words, and has sh run the last one over there.

As with the real one, what runs over there outlives it, and sees the end of its input when it is killed.
FAKE_SSH_LOG names the file; FAKE_SSH_WAY words to go there by, such as "ip netns exec there".
FAKE_SSH_DEAD names a file with hosts that cannot be reached.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

words = sys.argv[1:]
host = words[words.index("--") + 1]
with open(os.environ["FAKE_SSH_LOG"], "a") as log:
    log.write(json.dumps({"pid": os.getpid(), "words": words}) + "\n")
dead = Path(os.environ.get("FAKE_SSH_DEAD", "/nowhere"))
if dead.exists() and host in dead.read_text().split():
    print(f"ssh: connect to host {host} port 22: No route to host", file=sys.stderr, flush=True)
    sys.exit(255)
there = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/"}  # a login inherits nothing from here
child = subprocess.Popen(
    [*os.environ.get("FAKE_SSH_WAY", "").split(), "sh", "-c", words[-1]],
    stdin=subprocess.PIPE, start_new_session=True, env={**there, "FAR_HOST": host}, cwd="/",
)  # fmt: skip


def pass_on(pipe):
    try:
        while data := os.read(0, 4096):
            os.write(pipe.fileno(), data)
        pipe.close()
    except OSError:
        pass


threading.Thread(target=pass_on, args=[child.stdin], daemon=True).start()
code = child.wait()
os._exit(code if code >= 0 else 255)
