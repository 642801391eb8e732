"""A connection that a test can hold up: what a paused process, or a slow
network, looks like to the others."""

from __future__ import annotations

import contextlib
import socket
import threading


class Gate:
    """Passes bytes on to an address, unless it is shut.

    While it is shut nothing passes; what has arrived is passed on later. Where
    the other side has closed its connection, this one is closed then, too.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._to = (host, int(port))
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self._ended = self._loses = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def shut(self) -> None:
        """From now on nothing passes."""
        self._open.clear()

    def lose_replies(self) -> None:
        """From now on what the address answers is lost, until it has ended."""
        self._loses = True

    def open(self) -> None:
        """All passes again."""
        self._loses = False
        self._open.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(
                    target=self._connect, args=(client,), daemon=True
                ).start()

    def _connect(self, client: socket.socket) -> None:
        self._open.wait()
        if self._ended:
            client.close()
            return
        try:
            server = socket.create_connection(self._to)
        except OSError:
            client.close()
            return
        self._sockets += [client, server]
        for way in (client, server, False), (server, client, True):
            threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(
        self, source: socket.socket, to: socket.socket, replies: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                if not (replies and self._loses):
                    to.sendall(data)
        self._open.wait()
        for one in source, to:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
                one.close()

    def cut(self) -> None:
        """Ends all connections, as the death of a process does; there are no
        more."""
        self._ended = True
        with contextlib.suppress(OSError):  # ends a wait for a connection
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop()
        self._open.set()

    def drop(self) -> None:
        """Ends the connections there are, as a network does."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """No more connections."""
        self._open.set()
        self._listener.close()
