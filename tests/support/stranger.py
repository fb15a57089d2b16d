"""A client of gRPC and HTTP without Ray's libraries: what somebody on the network can send to an open port.

    python stranger.py FILE [TOKEN]

FILE has a line `HOST PORT METHOD` for each call. Calls the gRPC method with an empty message, with the token if there
is one, and prints a line of JSON for each: the gRPC status (-1: none, the connection was refused, closed or silent),
and how many bytes of messages came back. The method `/` is a request of HTTP/1.1; its status is that of HTTP.
"""

import json
import re
import socket
import struct
import sys
from pathlib import Path

TIMEOUT_S = 3.0
DATA, HEADERS, RESET, SETTINGS, GO_AWAY = 0, 1, 3, 4, 7
END_STREAM, END_HEADERS = 0x1, 0x4
UNIMPLEMENTED, UNAUTHENTICATED = 12, 16


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: str, value: str) -> bytes:
    """Return a header that is not indexed (RFC 7541, 6.2.2); names and values are shorter than 127 bytes."""
    texts = [text.encode() for text in (name, value)]
    assert all(len(text) < 127 for text in texts)
    return b"\0" + b"".join(bytes([len(text)]) + text for text in texts)


def request(host: str, method: str, token: str) -> bytes:
    """Return a whole call with an empty message."""
    headers = {":method": "POST", ":scheme": "http", ":path": f"/{method}", ":authority": host}
    headers |= {"content-type": "application/grpc", "te": "trailers"}
    headers |= {"authorization": f"Bearer {token}"} if token else {}
    block = b"".join(literal(name, value) for name, value in headers.items())
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b"")
    return preface + frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, b"\0" * 5)


def call(host: str, port: int, method: str, token: str = "") -> dict[str, int]:
    """Call a method. gRPC's servers never compress headers' texts, so the status stands in plain bytes."""
    status, received = -1, 0
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
            if method == "/":
                connection.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                match = re.match(rb"HTTP/1\.1 (\d+)", connection.recv(65536))
                return {"status": int(match[1]) if match else -1, "bytes": 0}
            connection.sendall(request(host, method, token))
            stream = connection.makefile("rb")
            while len(head := stream.read(9)) == 9:
                length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                payload = stream.read(length)
                received += length if kind == DATA else 0
                if kind == HEADERS and (match := re.search(rb"\x0bgrpc-status.(\d+)", payload, re.DOTALL)):
                    status = int(match[1])
                if kind in (RESET, GO_AWAY) or (kind in (DATA, HEADERS) and flags & END_STREAM):
                    break
    except OSError:
        pass
    return {"status": status, "bytes": received}


def main(calls: str, token: str = "") -> None:
    for line in Path(calls).read_text().splitlines():
        host, port, method = line.split()
        print(json.dumps({"host": host, "port": int(port), "method": method, **call(host, int(port), method, token)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
