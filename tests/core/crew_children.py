"""Functions of a crew's child processes in tests, with few imports."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

from rammer.errors import BadInput
from rammer_testing.worker_pool import BROKEN, Crew, Line, Member, Work, leave

Then = Callable[[Line], object]


def begin(then: Then, member: Member) -> Work:
    """Start a process that counts two candidates and then runs ``then``."""

    def work(end: float, line: Line) -> None:
        line.tell({"families": ["a", "b"], "start": "one case", "peak": 5})
        for what in ("whole", "partial"):
            line.tell({"cells": [["a", "float32", what, 1]], "fates": [["a", "float32", "run", 1]]})
        then(line)

    return work


def sleeps(line: Line) -> None:
    time.sleep(1000)


def leaves(line: Line) -> None:
    leave(BROKEN)


def dies(line: Line) -> None:
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGSEGV)


def fails(line: Line) -> None:
    raise ValueError("no such tile")


def ticks(line: Line) -> None:
    while True:
        line.tell({"peak": 5})
        time.sleep(0.02)


def hears(line: Line) -> None:
    line.tell({"kind": "heard", "failure": json.dumps([sorted(news) for news in line.news()])})
    leave()


def finds(line: Line) -> None:
    line.tell({"kind": "a float32 x", "failure": "case"})
    time.sleep(1000)


def working(member: Member) -> Work:
    """Return the work function, which performs the action named by each case."""

    def work(case: str, line: Line) -> None:
        word, _, number = case.partition(" ")
        if word == "raise":
            raise ValueError("no such tile")
        if word == "large":
            line.tell(_taken(int(number)))
        elif word == "sleep":
            time.sleep(float(number))
            line.tell(case)
        elif word == "speak":  # and sleep, with permission
            line.tell(case, silent=float(number))
            time.sleep(float(number))
            line.tell(os.getpid())
        elif word == "chatter":
            while True:
                line.tell(case)
        elif word == "stay":
            line.tell([os.getpid(), member.number])
            time.sleep(1000)
        else:
            line.tell(case)

    return work


def _taken(size: int) -> str:
    try:
        return f"{len(bytearray(size)) == size}"
    except MemoryError:
        return "refused"


def failing(member: Member) -> Work:
    raise TypeError("no such device")


def unable(member: Member) -> Work:
    raise BadInput("no such thing")


def dying(member: Member) -> Work:
    os._exit(9)


def several(end: float) -> None:
    """Search with two children that stay; print their process ids and the outcome."""

    def heard(member: Member, part: object) -> None:
        print(json.dumps(part), flush=True)

    def lost(member: Member, case: str, kind: str, why: str, answered: bool) -> None:
        print(json.dumps([kind, answered]), flush=True)

    Crew(working, ["stay"] * 9, 2, time.monotonic() + end, heard, lost, grace=0.2).run()
    print(json.dumps("done"))
