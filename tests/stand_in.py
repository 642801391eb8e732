"""The program of ``tests.ready.python``: ``stand_in.py PROGRAM WORDS ...``
hands on what it is started with and the signals it gets, and ends as the
process does that it stands for."""

import json
import os
import signal
import socket
import sys


def main() -> None:
    program, *words = sys.argv[1:]
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(program.removesuffix("python") + "socket")
    given = {"words": words, "cwd": os.getcwd(), "env": dict(os.environ)}
    socket.send_fds(channel, [json.dumps(given).encode()], [0, 1, 2])
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda n, _: channel.send(bytes([n])))
    status = int(channel.recv(64))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


main()
