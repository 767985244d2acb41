"""A FUSE file system with the properties of a mounted bucket, in memory. Needs root and Linux, not libfuse.

    python object_store.py MOUNTPOINT --delay_secs=0.5 --refused=FILE

- A directory cannot be renamed, nor a file over another one. With --no_renames, no rename is possible.
- A new name is listed only after `delay_secs`, and a deleted name is listed for that time. Opening by
  name has no delay.
- There are no locks: flock and fcntl fail.

Each refusal is a line in `refused`. SIGTERM unmounts. The type of the mount is fuse.gcsfuse.
"""

import argparse
import ctypes
import errno
import os
import signal
import stat
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

MAX_WRITE = 1 << 17
_HEADER = struct.Struct("<IIQQIIIHH")
_POSIX_LOCKS, _ATOMIC_TRUNC, _BIG_WRITES, _FLOCK = 1 << 1, 1 << 3, 1 << 5, 1 << 10
_FROM_SIZE, _DETACH = 1 << 3, 2
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Node:
    number: int
    is_dir: bool
    content: bytearray = field(default_factory=bytearray)
    names: dict = field(default_factory=dict)  # of a directory: name -> Node
    shown_at: dict = field(default_factory=dict)  # name -> time from which it is listed
    gone_at: dict = field(default_factory=dict)  # deleted name -> time until which it is listed
    changed: float = field(default_factory=time.time)

    def attributes(self):
        mode = stat.S_IFDIR | 0o755 if self.is_dir else stat.S_IFREG | 0o644
        secs, nanos = int(self.changed), int(self.changed % 1 * 1e9)
        size = len(self.content)
        return struct.pack("<QQQQQQIIIIIIIIII", self.number, size, -(-size // 512), secs, secs, secs,
                           nanos, nanos, nanos, mode, 1, 0, 0, 0, 4096, 0)  # fmt: skip

    def entry(self):
        return struct.pack("<QQQQII", self.number, 0, 0, 0, 0, 0) + self.attributes()


class Store:
    """A file system that answers the kernel's requests sequentially."""

    def __init__(self, options):
        self._delay, self._no_renames = options.delay_secs, options.no_renames
        self._refused = options.refused
        self._nodes = {1: Node(1, True)}

    def answer(self, opcode, node, body):
        """Returns the body of the reply, or None if no reply is expected. Raises OSError."""
        name = f"_{opcode}"
        if opcode in (2, 36, 42):  # forget, interrupt, batch_forget
            return None
        if not hasattr(self, name):
            raise OSError(errno.ENOSYS, "not here")
        if node not in self._nodes and opcode != 26:
            raise OSError(errno.ESTALE, "gone")
        return getattr(self, name)(self._nodes.get(node), body)

    def _refuse(self, message, number=errno.EPERM):
        if self._refused:
            with open(self._refused, "a") as file:
                file.write(message + "\n")
        raise OSError(number, message)

    def _new(self, parent, name, is_dir):
        node = Node(max(self._nodes) + 1, is_dir)
        self._nodes[node.number] = parent.names[name] = node
        parent.shown_at[name] = time.time() + self._delay
        parent.gone_at.pop(name, None)
        return node

    def _remove(self, parent, name):
        parent.gone_at[name] = time.time() + self._delay
        parent.shown_at.pop(name, None)
        return parent.names.pop(name)

    def _child(self, parent, name):
        if name not in parent.names:
            raise OSError(errno.ENOENT, name)
        return parent.names[name]

    def _1(self, parent, body):  # lookup
        return self._child(parent, decode_text(body)).entry()

    def _3(self, node, body):  # getattr
        return struct.pack("<QII", 0, 0, 0) + node.attributes()

    def _4(self, node, body):  # setattr
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & _FROM_SIZE:
            del node.content[size:]
            node.content.extend(b"\0" * (size - len(node.content)))
            node.changed = time.time()
        return self._3(node, body)

    def _9(self, parent, body):  # mkdir
        name = decode_text(body[8:])
        if name in parent.names:
            raise OSError(errno.EEXIST, name)
        return self._new(parent, name, True).entry()

    def _10(self, parent, body):  # unlink
        self._child(parent, decode_text(body))
        self._remove(parent, decode_text(body))
        return b""

    def _11(self, parent, body):  # rmdir
        if self._child(parent, decode_text(body)).names:
            raise OSError(errno.ENOTEMPTY, decode_text(body))
        self._remove(parent, decode_text(body))
        return b""

    def _12(self, parent, body, head=8):  # rename
        goal = self._nodes[struct.unpack_from("<Q", body)[0]]
        old, new = body[head:].split(b"\0")[:2]
        old, new = old.decode(), new.decode()
        node = self._child(parent, old)
        if node.is_dir:
            self._refuse(f"rename of the directory {old}")
        if new in goal.names:
            self._refuse(f"rename over {new}")
        if self._no_renames:
            self._refuse(f"rename of {old}")
        self._remove(parent, old)
        goal.names[new] = node
        goal.shown_at[new] = time.time() + self._delay
        return b""

    def _45(self, parent, body):  # rename2
        return self._12(parent, body, head=16)

    def _13(self, parent, body):  # link
        self._refuse("a hard link")

    def _6(self, parent, body):  # symlink
        self._refuse("a symbolic link")

    def _14(self, node, body):  # open
        if struct.unpack_from("<I", body)[0] & os.O_TRUNC:
            node.content.clear()
        return struct.pack("<QII", node.number, 0, 0)

    def _27(self, node, body):  # opendir
        return struct.pack("<QII", node.number, 0, 0)

    def _35(self, parent, body):  # create
        flags, name = struct.unpack_from("<I", body)[0], decode_text(body[16:])
        if name in parent.names and flags & os.O_EXCL:
            raise OSError(errno.EEXIST, name)
        node = parent.names.get(name) or self._new(parent, name, False)
        return node.entry() + self._14(node, body)

    def _15(self, node, body):  # read
        _, at, size = struct.unpack_from("<QQI", body)
        return bytes(node.content[at : at + size])

    def _16(self, node, body):  # write
        _, at, size = struct.unpack_from("<QQI", body)
        if len(node.content) < at:
            node.content.extend(b"\0" * (at - len(node.content)))
        node.content[at : at + size] = body[40 : 40 + size]
        node.changed = time.time()
        return struct.pack("<II", size, 0)

    def _17(self, node, body):  # statfs
        return struct.pack("<QQQQQIIII24x", 1 << 30, 1 << 30, 1 << 30, 1 << 20, 1 << 20, 4096, 255, 4096, 0)

    def _18(self, node, body):  # release, and other requests without an answer
        return b""

    _20 = _25 = _29 = _30 = _34 = _38 = _18

    def _28(self, node, body):  # readdir
        _, at, size = struct.unpack_from("<QQI", body)
        current_time = time.time()
        listed = [n for n, since in node.shown_at.items() if since <= current_time]
        listed += [n for n, until in node.gone_at.items() if until > current_time and n not in node.names]
        reply = b""
        for i, name in enumerate(sorted(listed)[at:], at + 1):
            raw = name.encode()
            record = struct.pack("<QQII", 2, i, len(raw), 0) + raw
            record += b"\0" * (-len(record) % 8)
            if len(reply) + len(record) > size:
                break
            reply += record
        return reply

    def _32(self, node, body):  # setlk, also of flock
        self._refuse("a lock", errno.ENOLCK)

    _31 = _33 = _32

    def _26(self, node, body):  # init
        flags = _POSIX_LOCKS | _ATOMIC_TRUNC | _BIG_WRITES | _FLOCK
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, flags, 12, 10, MAX_WRITE, 1, 0, 0, 0)


def decode_text(body):
    return bytes(body).split(b"\0")[0].decode()


def serve(device, store):
    while True:
        try:
            request = os.read(device, MAX_WRITE + 8192)
        except OSError as e:
            if e.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                continue
            return  # unmounted
        length, opcode, unique, node, *_ = _HEADER.unpack_from(request)
        try:
            body, number = store.answer(opcode, node, request[_HEADER.size : length]), 0
        except OSError as e:
            body, number = b"", e.errno
        if body is not None:
            try:
                os.write(device, struct.pack("<IiQ", 16 + len(body), -number, unique) + body)
            except FileNotFoundError:
                continue  # the requesting process was killed


def mount(directory):
    """Returns the device to serve. Raises OSError if mounting is not permitted."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    status = _libc.mount(b"bucket", os.fsencode(directory), b"fuse.gcsfuse", 0, options.encode())
    if status != 0:
        os.close(device)
        raise OSError(ctypes.get_errno(), "mount")
    return device


def unmount(directory):
    _libc.umount2(os.fsencode(directory), _DETACH)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("where", type=Path)
    parser.add_argument("--delay_secs", type=float, default=0.0)
    parser.add_argument("--no_renames", action="store_true")
    parser.add_argument("--refused", help="file for a line per refusal")
    options = parser.parse_args()
    try:
        device = mount(options.where)
    except OSError as e:
        print(f"cannot mount: {e}", flush=True)
        sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: unmount(options.where))
    print("mounted", flush=True)
    serve(device, Store(options))


if __name__ == "__main__":
    main()
