"""Ends all processes of a run without torchrun if one of them dies. NCCL would wait for the dead process.

Process 0 holds a connection to each other process. The operating system closes it when either one ends."""

import contextlib
import os
import selectors
import socket
import sys
import threading
from typing import Any

_DONE = b"d"  # a process that needs the others no more says so


class Watch:
    """Process 0 watches all others, the others watch process 0. `store`: torch.distributed's. `host`: the
    address of process 0. It raises TimeoutError if another process does not come within `seconds`."""

    def __init__(self, store: Any, host: str, rank: int, count: int, seconds: float) -> None:
        self.rank, self.count = rank, count
        self.peers: dict[Any, int] = {}  # sockets and ranks
        if rank == 0:
            with socket.create_server(("", 0)) as server:
                server.settimeout(seconds)
                store.set("cukern_watch", str(server.getsockname()[1]))
                while len(self.peers) < count - 1:
                    peer = server.accept()[0]
                    self.peers[peer] = int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "little")
        else:
            peer = socket.create_connection((host, int(store.get("cukern_watch"))))
            peer.sendall(rank.to_bytes(4, "little"))
            self.peers[peer] = 0
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self.peers:
                selector.register(peer, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    message = _read(key.fileobj)
                    if message != _DONE:
                        self._end(int(message) if message else self.peers[key.fileobj])
                    selector.unregister(key.fileobj)

    def _end(self, dead: int) -> None:
        """Process 0 tells the others. os._exit: the other threads may wait for the dead process in NCCL."""
        text = f"rank {dead} of {self.count} has ended, and so does rank {self.rank}"
        print(text, file=sys.stderr, flush=True)
        for peer in self.peers if self.rank == 0 else ():
            _send(peer, str(dead).encode())
        os._exit(1)

    def done(self) -> None:
        """The end of this process is no fault."""
        for peer in self.peers:
            _send(peer, _DONE)


def _read(peer: Any) -> bytes:
    try:
        return peer.recv(16)
    except OSError:  # reset: the process has ended
        return b""


def _send(peer: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        peer.sendall(message)
