"""Relay between two network interfaces that delays every frame: `python slow_link.py NEAR FAR SECS`.

It prints "ready". Frames travel with their virtio header, so that checksums and sizes that the kernel has
left to the network card stay valid.
"""

import collections
import select
import socket
import sys
import time

_ALL_PROTOCOLS = 3  # <linux/if_ether.h>: ETH_P_ALL
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23  # <linux/if_packet.h>
_MAX_BYTES = 1 << 17


def _socket(interface):
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    raw.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    raw.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    raw.bind((interface, 0))
    return raw


def main(near, far, delay_secs):
    """Relays until it is ended."""
    ends = [_socket(near), _socket(far)]
    pending = collections.deque()  # (when to send, socket, frame)
    print("ready", flush=True)
    while True:
        wait_secs = max(0.0, pending[0][0] - time.monotonic()) if pending else 1.0
        for end in select.select(ends, [], [], wait_secs)[0]:
            frame = end.recv(_MAX_BYTES)
            pending.append((time.monotonic() + delay_secs, ends[1 - ends.index(end)], frame))
        while pending and pending[0][0] <= time.monotonic():
            _, end, frame = pending.popleft()
            end.send(frame)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
