#!/usr/bin/env python3
"""A substitute for ssh that records its arguments and runs the command locally with sh.

As with ssh, the remote command survives this process and reads end-of-file if it is killed.
FAKE_SSH_LOG names the log; FAKE_SSH_WAY is a command prefix such as "ip netns exec there".
FAKE_SSH_DEAD names a file with hosts that cannot be reached.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

arguments = sys.argv[1:]
host = arguments[arguments.index("--") + 1]
with open(os.environ["FAKE_SSH_LOG"], "a") as log:
    log.write(json.dumps({"pid": os.getpid(), "words": arguments}) + "\n")
dead_hosts = Path(os.environ.get("FAKE_SSH_DEAD", "/nowhere"))
if dead_hosts.exists() and host in dead_hosts.read_text().split():
    print(f"ssh: connect to host {host} port 22: No route to host", file=sys.stderr, flush=True)
    sys.exit(255)
remote_environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/"}  # a login inherits no variable
child = subprocess.Popen(
    [*os.environ.get("FAKE_SSH_WAY", "").split(), "sh", "-c", arguments[-1]],
    stdin=subprocess.PIPE, start_new_session=True, env={**remote_environ, "FAR_HOST": host}, cwd="/",
)  # fmt: skip


def forward_input(pipe):
    try:
        while data := os.read(0, 4096):
            os.write(pipe.fileno(), data)
        pipe.close()
    except OSError:
        pass


threading.Thread(target=forward_input, args=[child.stdin], daemon=True).start()
code = child.wait()
os._exit(code if code >= 0 else 255)
