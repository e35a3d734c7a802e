"""A watchdog that ends a process blocked in a call without a time limit, with an error that describes the wait."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from typing import Final

from rammer.errors import DeviceFailure, to_printable

#: Additional seconds for a wait that enforces a time limit itself.
GRACE: Final = 2.0
#: Seconds between two checks.
TICK: Final = 0.25


class Watch:
    """A watchdog thread. If it ``hears`` SIGTERM, which launchers send after another process has died, it reports the current
    wait and ends the process."""

    def __init__(self, who: str, timeout: float, hears: bool = True) -> None:
        self.who, self.timeout, self._what, self._last, self._since, self._over = who, timeout, "", "", 0.0, False
        self._hear, self._call = os.pipe()
        self._before: tuple[object, int] | None = None
        if hears and threading.current_thread() is threading.main_thread():
            os.set_blocking(self._call, False)
            self._before = (
                signal.signal(signal.SIGTERM, _handle_signal),
                signal.set_wakeup_fd(self._call, warn_on_full_buffer=False),
            )
        self._thread = threading.Thread(target=self._watch_loop, name="rammer watch", daemon=True)
        self._thread.start()

    def doing(self, what: str, last: str = "") -> None:
        """Set the current activity; "" for one that cannot hang. With ``last`` the time is short and ``last`` is the final
        message."""
        self._what, self._last, self._since = "", last, time.monotonic()
        self._what = what

    def close(self) -> None:
        """End the thread and restore the signal handlers."""
        if self._over:
            return
        self._over = True
        if self._before is not None:
            signal.set_wakeup_fd(self._before[1])
            signal.signal(signal.SIGTERM, self._before[0])  # type: ignore[arg-type]
        os.write(self._call, b"\0")
        self._thread.join()
        os.close(self._hear)
        os.close(self._call)

    def _watch_loop(self) -> None:
        while not self._over:
            heard = os.read(self._hear, 64) if select.select([self._hear], [], [], TICK)[0] else b""
            what, since, last = self._what, self._since, self._last
            if signal.SIGTERM in heard:
                _exit_process(
                    what or f"{self.who} was computing", "the run was ended from outside: another process may have died"
                )
            spent = time.monotonic() - since
            if what and last and spent > GRACE:
                _exit_process("", last)
            if what and what == self._what and spent > self.timeout + GRACE:
                _exit_process(what, f"it has not ended within {self.timeout:g} s: the other process hangs or has died")


def _handle_signal(*_: object) -> None:
    """Do nothing: the watch receives the signal by its pipe, even during a long call in Python."""


def _exit_process(what: str, why: str) -> None:
    """End the process with the message and exit code of a DeviceFailure."""
    sys.stderr.write(f"rammer: error: {to_printable(str(DeviceFailure(why, where=what)))}\n")
    sys.stderr.flush()
    os._exit(DeviceFailure.exit_code)
