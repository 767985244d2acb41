"""Invalid and hostile connections to a port. `with crowd(port): ...` keeps them active during the block.

They are in a process of their own, because they may take all descriptors of a process. TensorFlow aborts a
process without a free one (`std::random_device`).
"""

import contextlib
import random
import socket
import struct
import subprocess
import sys
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
    """Opens silent and slow connections, and repeats every line of LINES until the block ends."""
    command = [sys.executable, __file__, *map(str, (port, silent, slow))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"started\n"
        try:
            yield
        finally:
            process.stdin.close()
            assert process.wait(600) == 0


def main(port, silent, slow):
    """Runs a crowd until the end of standard input."""
    stopped = threading.Event()
    tasks = [
        lambda: _hold(port, stopped, silent), lambda: _drip(port, stopped, slow),
        lambda: _talk(port, stopped), lambda: _mirror(port, stopped),
    ]  # fmt: skip
    threads = [threading.Thread(target=task, daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    print("started", flush=True)
    sys.stdin.read()
    stopped.set()
    for thread in threads:
        thread.join(600)


def connect(port):
    """Returns a connection, or None if the port does not listen."""
    with contextlib.suppress(OSError):
        return socket.create_connection(("127.0.0.1", port), timeout=2)
    return None


def _hold(port, stopped, count):
    """Holds silent connections and replaces closed ones."""
    connections = []
    while not stopped.wait(0.01):
        connections = [connection for connection in connections if not _is_closed(connection)]
        while len(connections) < count and not stopped.is_set():
            new_connection = connect(port)
            if new_connection is None:
                break
            connections.append(new_connection)
    for connection in connections:
        connection.close()


def _drip(port, stopped, count):
    """Sends a possible proof one byte at a time."""
    text, sent_by_connection = MAGIC + b"\0" * 1000, {}
    while not stopped.wait(0.2):
        while len(sent_by_connection) < count and (new_connection := connect(port)) is not None:
            sent_by_connection[new_connection] = 0
        for connection, sent in list(sent_by_connection.items()):
            try:
                connection.send(text[sent : sent + 1])
                sent_by_connection[connection] = sent + 1
            except OSError:
                del sent_by_connection[connection]
    for connection in sent_by_connection:
        connection.close()


def _talk(port, stopped):
    while not stopped.wait(0.001):
        for line in LINES.values():
            connection = connect(port)
            if connection is not None:
                with contextlib.suppress(OSError), connection:
                    connection.sendall(line)


def _mirror(port, stopped):
    """Sends all data of one connection back to it and to a second connection."""
    while not stopped.wait(0.001):
        first, second = connect(port), connect(port)
        if first is None or second is None:
            continue
        with contextlib.suppress(OSError), first, second:
            first.settimeout(0.1)
            for _ in range(3):
                received = first.recv(4096)
                if not received:
                    break
                first.sendall(received)
                second.sendall(received)


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


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
