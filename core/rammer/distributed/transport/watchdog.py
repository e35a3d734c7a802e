"""Ends a process that waits for another one inside a call that has no time limit, with an error that says what for."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from typing import Final

from rammer.errors import DeviceFailure, to_printable

#: Seconds after which a device that waits for another one gives up.
TIMEOUT: Final = 10.0
#: Seconds that a wait with a limit of its own has, besides that, to end by itself.
GRACE: Final = 2.0
#: Seconds between two looks.
TICK: Final = 0.25


class Watch:
    """A thread of its own. It also ``hears`` that a launcher ends this process (SIGTERM), as launchers do when another one has
    died, and says what was being waited for then."""

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
        """From now on; "" for nothing that can hang. With ``last`` it has only a short time, and that is said in the end."""
        self._what, self._last, self._since = "", last, time.monotonic()
        self._what = what

    def close(self) -> None:
        """End the thread, and give signals back."""
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
    """The watch hears it by its pipe: also while Python is in a call that takes long."""


def _exit_process(what: str, why: str) -> None:
    """End the process as an error does."""
    sys.stderr.write(f"rammer: error: {to_printable(str(DeviceFailure(why, where=what)))}\n")
    sys.stderr.flush()
    os._exit(DeviceFailure.exit_code)
