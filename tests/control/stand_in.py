"""A unit without Forebay in it: listens, answers its probe, and misbehaves as its specification asks.

`settings.behave`: `well`, `dies` (at once, with a few words), `deaf` (never listens), `mute` (never answers),
`stubborn` (ignores SIGTERM), `loads` (never gets ready).
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_bytes())
    behave = spec.get("settings", {}).get("behave", "well")
    if behave == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"started {sys.argv[1]}", flush=True)
    if behave == "dies":
        sys.exit("cannot go on: the moon is full")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if "peers_dir" in spec:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((spec["host"], spec.get("port", 0)))
    listener.listen(64)
    if behave == "deaf":
        signal.pause()
    endpoint = Path(spec["endpoint_path"])
    draft = endpoint.with_suffix(".tmp")
    draft.write_text(json.dumps({"pid": os.getpid(), "host": spec["host"], "port": listener.getsockname()[1]}))
    draft.rename(endpoint)
    if "peers_dir" in spec:
        Path(spec["peers_dir"]).mkdir(exist_ok=True)
        (Path(spec["peers_dir"]) / f"{spec['id']}.json").write_text(endpoint.read_text())
    open_ones = []
    while True:
        connection, _ = listener.accept()
        if behave == "mute":
            open_ones.append(connection)
            continue
        with connection:
            connection.recv(65536)
            body = json.dumps(
                {
                    "replica": spec.get("replica", ""),
                    "generation": spec["generation"],
                    "model": spec.get("model", ""),
                    "revision": spec.get("revision", ""),
                    "state": "warming" if behave == "loads" else "ready",
                    "capacity": 8,
                }
            )
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            connection.sendall((head + body).encode())


main()
