"""An NBD server of a kind that knows little, over one file: plain_server.py KIND SOCKET FILE.

plain: EXPORT_NAME alone; any other option ends the connection. polite: refuses other options in words. unfixed: newstyle
without its fix. oldstyle: no options at all. Kinds that end in "-silent" greet one client at a time.
"""
import os
import socket
import struct
import sys
import threading

KIND, PATH, FILE = sys.argv[1:]
DISK = os.open(FILE, os.O_RDWR)
SIZE = os.fstat(DISK).st_size
FLAGS = 1 | 4  # HAS_FLAGS, SEND_FLUSH


def take(peer, count):
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def handshake(peer):
    if KIND.startswith("oldstyle"):
        peer.sendall(b"NBDMAGIC" + struct.pack(">QQI", 0x420281861253, SIZE, FLAGS) + bytes(124))
        return
    peer.sendall(b"NBDMAGICIHAVEOPT" + struct.pack(">H", 0 if KIND.startswith("unfixed") else 1))
    take(peer, 4)
    while True:
        magic, option, length = struct.unpack(">8sII", take(peer, 16))
        name = take(peer, length)
        if option == 1:
            if name not in (b"", b"disk"):
                raise EOFError
            peer.sendall(struct.pack(">QH", SIZE, FLAGS) + bytes(124))
            return
        if not KIND.startswith("polite"):
            raise EOFError
        peer.sendall(struct.pack(">QIII", 0x3E889045565A9, option, 0x80000001, 0))


def serve(peer):
    try:
        handshake(peer)
        while True:
            magic, flags, kind, cookie, at, length = struct.unpack(">IHHQQI", take(peer, 28))
            data = b""
            if kind == 0:
                data = os.pread(DISK, length, at)
            elif kind == 1:
                os.pwrite(DISK, take(peer, length), at)
            elif kind == 3:
                os.fsync(DISK)
            else:
                return
            peer.sendall(struct.pack(">IIQ", 0x67446698, 0, cookie) + data)
    except (EOFError, OSError):
        pass
    finally:
        peer.close()


listener = socket.socket(socket.AF_UNIX)
listener.bind(PATH)
listener.listen(1)
while True:
    client, _ = listener.accept()
    if KIND.endswith("-silent"):
        serve(client)
    else:
        threading.Thread(target=serve, args=(client,), daemon=True).start()
