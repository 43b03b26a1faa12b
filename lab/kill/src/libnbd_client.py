"""An NBD client made with libnbd that connects again when its server goes away.

Arguments: socket, first and last byte of its part of the disk, seed. It changes blocks until standard input
ends, then reads all of them and compares. An error that the server answers ends it.
"""

import random
import select
import sys
import time

import nbd

BLOCK = 4096
CONNECT_LIMIT = 30


def connect(socket):
    end = time.monotonic() + CONNECT_LIMIT
    while True:
        handle = nbd.NBD()
        try:
            handle.connect_unix(socket)
            return handle
        except nbd.Error:
            if time.monotonic() > end:
                raise
            time.sleep(0.002)


class Client:
    def __init__(self, socket):
        self.socket = socket
        self.handle = connect(socket)
        self.connections = 1

    def request(self, what):
        """Does a request, on another connection where this one ended before the answer."""
        while True:
            try:
                return what(self.handle)
            except nbd.Error:
                if self.handle.aio_is_ready():
                    raise
                self.handle = connect(self.socket)
                self.connections += 1


def main():
    socket, start, end, seed = sys.argv[1], *map(int, sys.argv[2:])
    numbers = random.Random(seed)
    client = Client(socket)
    print("connected", flush=True)
    expected = {}
    while not select.select([sys.stdin], [], [], 0)[0]:
        offset = numbers.randrange(start // BLOCK, end // BLOCK) * BLOCK
        if numbers.randrange(4) == 0:
            data = bytes(BLOCK)
            client.request(lambda handle: handle.zero(BLOCK, offset))
        else:
            data = numbers.randbytes(BLOCK)
            client.request(lambda handle: handle.pwrite(data, offset))
        expected[offset] = data
    for offset, data in expected.items():
        if client.request(lambda handle: handle.pread(BLOCK, offset)) != data:
            sys.exit(f"the block at {offset} is not what was answered last")
    print(f"{len(expected)} blocks, {client.connections} connections")


main()
