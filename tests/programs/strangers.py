"""What strangers send to a port: `with crowd(port): ...` keeps all of it up as long as the block lasts."""

import contextlib
import random
import socket
import struct
import threading

MAGIC = b"ctl-1\r\n\0"
LINES = {
    "gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a list": b"[]\n",
    "a number": b"5\n",
    "deep JSON": b"[" * 100_000 + b"\n",
    "rank -1": b'{"ctl": 1, "rank": -1, "facts": {}}\n',
    "rank 1": b'{"ctl": 1, "rank": 1, "facts": {"a": [1]}}\n',
    "a deep fact": b'{"ctl": 1, "rank": 1, "facts": {"a": ' + b"[" * 2000 + b"]" * 2000 + b"}}\n",
    "a frame": struct.pack("<IQ", 2, 0) + b"[]",
    "a long frame": struct.pack("<IQ", 1 << 26, 1 << 40) + b"x" * 1_000_000,
    "a nonce": b'{"nonce": "00", "proof": "00", "hello": {"worker": 0}}\n',
    "its magic": MAGIC + b"\0" * 32 + b"\xff\xff" + b"x" * 65535,
    "a wrong proof": MAGIC + b"\0" * 32 + b"\0\2{}" + b"\0" * 32,
    "bytes": random.Random(7).randbytes(100_000),
}


@contextlib.contextmanager
def crowd(port, silent=300, slow=20):
    """Silent and slow connections, and every one of LINES again and again; ends with the block."""
    over = threading.Event()
    tasks = [
        lambda: _hold(port, over, silent), lambda: _drip(port, over, slow),
        lambda: _talk(port, over), lambda: _mirror(port, over),
    ]  # fmt: skip
    threads = [threading.Thread(target=task, daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


def call(port):
    """A connection, or None while nobody listens."""
    with contextlib.suppress(OSError):
        return socket.create_connection(("127.0.0.1", port), timeout=2)
    return None


def _hold(port, over, count):
    """Connections that say nothing; new ones for those that were closed."""
    held = []
    while not over.wait(0.01):
        held = [one for one in held if not _is_closed(one)]
        while len(held) < count and not over.is_set():
            found = call(port)
            if found is None:
                break
            held.append(found)
    for one in held:
        one.close()


def _drip(port, over, count):
    """A byte at a time of what may become a proof."""
    text, held = MAGIC + b"\0" * 1000, {}
    while not over.wait(0.2):
        while len(held) < count and (found := call(port)) is not None:
            held[found] = 0
        for one, sent in list(held.items()):
            try:
                one.send(text[sent : sent + 1])
                held[one] = sent + 1
            except OSError:
                del held[one]
    for one in held:
        one.close()


def _talk(port, over):
    while not over.wait(0.001):
        for line in LINES.values():
            found = call(port)
            if found is not None:
                with contextlib.suppress(OSError), found:
                    found.sendall(line)


def _mirror(port, over):
    """Everything that comes from one connection goes back to it, and into another one."""
    while not over.wait(0.001):
        one, other = call(port), call(port)
        if one is None or other is None:
            continue
        with contextlib.suppress(OSError), one, other:
            one.settimeout(0.1)
            for _ in range(3):
                came = one.recv(4096)
                if not came:
                    break
                one.sendall(came)
                other.sendall(came)


def _is_closed(connection):
    connection.setblocking(False)
    try:
        while data := connection.recv(4096):
            del data
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True
