"""Runs one kind of work in a process of its own, one request after the other; a request may kill it
(`protos.limited.limited_process`).

Run as a script with the path of another one, whose `make_answer()` returns a function from bytes to bytes. Neither
imports this project: the process starts in a tenth of a second. Its standard input is a socket::

    ready         length 0
    request       length, CPU time that may be taken in ms, content
    answer        length, content
"""

from __future__ import annotations

import os
import resource
import runpy
import signal
import socket
import struct
import sys
import threading

STACK_BYTES = 256 * 2**20  # of address space: recursion follows the nesting of the input
MAX_MEMORY_BYTES = 2 * 2**30
NICE = 10  # lower priority than processes that compute tokens
HEAD, ANSWER = struct.Struct("!II"), struct.Struct("!I")


def main() -> None:
    answer = runpy.run_path(sys.argv[1])["make_answer"]()
    connection = socket.socket(fileno=0)
    stream = connection.makefile("rb")
    connection.sendall(ANSWER.pack(0))
    while head := stream.read(HEAD.size):
        num_bytes, cpu_ms = HEAD.unpack(head)
        request = stream.read(num_bytes)
        signal.setitimer(signal.ITIMER_PROF, cpu_ms / 1000)  # its signal ends the process
        reply = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(ANSWER.pack(len(reply)) + reply)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    deep = threading.Thread(target=main, daemon=True)
    deep.start()
    deep.join()
    sys.exit(0)
