"""The process that ``measure_process.py`` starts: it opens a device, then measures the kernels that it receives."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from multiprocessing.connection import Connection

from rammer.device.guard import Opening
from rammer.device.loader import Registry
from rammer.tuning.measure_process import IDLE, to_sendable


def serve_requests(line: Connection) -> None:
    """Answer with two times, or with the exception, until the connection is closed or idle. The first
    message names the device."""
    opening: Opening = line.recv()
    options = opening.options
    try:
        backend = Registry().open(f"{opening.device}:{options.index}", options.require, options.target, options.options)
        profiler = backend.profiler
    except Exception as problem:
        line.send(to_sendable(problem))
        return
    line.send("open")
    while line.poll(IDLE):
        operator, binding = line.recv()
        try:
            line.send(profiler.task_time(backend.kernel(operator, binding), binding))
        except Exception as problem:
            line.send(to_sendable(problem))


def exit_with_parent(parent: int) -> None:
    """Exit with ``parent``, also from within a kernel that hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=exit_with_parent, args=(os.getppid(),), daemon=True).start()
    line = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        serve_requests(line)
    # Closing a device that a kernel has broken may hang.
    sys.stderr.flush()
    os._exit(0)
