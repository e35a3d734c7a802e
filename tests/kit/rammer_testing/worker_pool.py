"""Children that search side by side: started, fed with cases, followed, and replaced. Every search runs in such a crew.

A child that dies or says nothing for too long costs the case that it was at, which its search is told of, and another takes its
place. What a child says counts at once, so nothing is lost with it. The end is kept to whatever children do; SIGTERM and
Control-C bring it forward, and a second one breaks off. No child outlives its parent.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final, NoReturn, TypeAlias

from rammer.child_processes import spawn_process
from rammer.errors import BadInput, RammerError
from rammer_testing.sandbox import Machinery, end_with_parent, few_cores, limit_memory

#: Seconds for a child to begin: many of them read the same packages at once.
BEGINNING: Final = 90.0
#: Seconds for one to end that has closed its line.
ENDING: Final = 5.0
#: Children that may die before they have asked for a case, beside one for each place.
FALSE_STARTS: Final = 3
#: Seconds between looks at children, and between reports of what was found so far.
LOOK, PERIOD = 0.2, 5.0
#: Exit codes of a child that leaves for another to begin afresh, the second where its device may be broken.
DONE, BROKEN = 0, 3
#: What is told of a case that was not finished.
HANG, DEATH, UNFINISHED = "hang", "death", "unfinished"


class _Ask(Enum):
    CASE = "a case"
    NEWS = "what others have found"


_NONE: Final = _Ask.CASE  # stands for no case: None may be one


def check_tried(count: int, what: str, seconds: float) -> None:
    """BadInput where a search has tried nothing: its empty table would look as if nothing were wrong."""
    if not count:
        raise BadInput(
            f"no {what} was tried in {seconds:.0f} s",
            hint="give more --seconds: opening the device, and making what is searched, takes the first of them",
        )


@dataclass(frozen=True)
class _Raised:
    """A child's last words, where an exception ended it: what it was, and its traceback."""

    what: str
    trace: str

    @classmethod
    def by(cls, error: Exception) -> _Raised:
        """Of ``error``, as Python prints it."""
        return cls(traceback.format_exception_only(error)[-1].strip(), "".join(traceback.format_exception(error)).rstrip())

    def __str__(self) -> str:
        return f"the process ended by {self.what}\n{self.trace}"


@dataclass(frozen=True)
class Member:
    """A place in the crew: its number, how many there are, and how many children it has had before."""

    number: int
    size: int
    turn: int = 0

    @property
    def seed(self) -> str:
        """What tells its random numbers from others'."""
        return f"{self.number}.{self.size}.{self.turn}"


@dataclass
class Line:
    """A child's end of the line to its parent. Without one it leaves: nobody waits for what it finds."""

    pipe: Connection
    _fresh: list[Any] = field(default_factory=list)

    def tell(self, part: Any, silent: float = 0.0) -> None:
        """Say something of the case. ``silent``: seconds beyond the usual patience that may pass until the next word."""
        self._say((part, silent))

    def news(self) -> list[Any]:
        """What was spread since the last question."""
        self._asked(_Ask.NEWS)
        news, self._fresh = self._fresh, []
        return news

    def case(self) -> Any:
        """The next case."""
        return self._asked(_Ask.CASE)

    def _say(self, what: Any) -> None:
        try:
            self.pipe.send(what)
        except OSError:
            leave()

    def _asked(self, what: _Ask) -> Any:
        self._say(what)
        try:
            case, news = self.pipe.recv()
        except (EOFError, OSError):
            leave()
        self._fresh += news
        return case


#: What a child does with a case; and what is called in it first, which opens what it needs. RammerError of the latter, or
#: Machinery at any time, ends the search where no child has begun.
Work: TypeAlias = Callable[[Any, Line], None]
Begin: TypeAlias = Callable[[Member], Work]


def leave(code: int = DONE) -> NoReturn:
    """End this child, for another to take its place. Nothing that a library does at its own end keeps it."""
    os._exit(code)


@dataclass
class _Child:
    """The parent's view: the case it is at, when it last spoke, how long it may be silent beyond the usual, and whether it has
    said anything of the case; the news that it has."""

    member: Member
    process: Any
    pipe: Connection
    at: Any = _NONE
    since: float = field(default_factory=time.monotonic)
    silent: float = BEGINNING
    answered: bool = False
    known: int = 0


@dataclass
class Crew:
    """``size`` children, each of which calls ``begin`` (it is pickled) and gets ``cases`` until there are none or ``end`` (of the
    clock, ``time.monotonic``) is past; what is not done ``grace`` seconds later is ended.

    ``heard(member, part)`` gets what they tell, ``lost(member, case, kind, why, answered)`` cases that were not finished
    (``why`` has more lines where it was an exception: its traceback), and ``kept()`` is called every few seconds and last.
    ``memory`` are bytes of address space that a child may take beyond what it has when it has begun; 0 is no limit. With
    ``pinned`` children see two to four of the cores each: runtimes that start a thread for each would fight."""

    begin: Begin
    cases: Iterable[Any]
    size: int
    end: float
    heard: Callable[[Member, Any], None]
    lost: Callable[[Member, Any, str, str, bool], None]
    kept: Callable[[], None] = lambda: None
    grace: float = 5.0
    patience: float = 120.0
    memory: int = 0
    pinned: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    started: int = 0
    _children: list[_Child] = field(default_factory=list)
    _news: list[Any] = field(default_factory=list)
    _begun: bool = False
    _false_starts: int = 0

    @property
    def over(self) -> bool:
        """Whether no case may be begun."""
        return time.monotonic() > self.end

    @property
    def running(self) -> int:
        """Children that live."""
        return len(self._children)

    def stop(self, grace: float | None = None) -> None:
        """Begin no case from now on."""
        self.end, self.grace = min(self.end, time.monotonic()), self.grace if grace is None else grace

    def spread(self, item: Any) -> None:
        """Let every child have ``item`` with its next case, or when it asks."""
        self._news.append(item)

    def run(self) -> None:
        """All of it. RammerError where no child can begin."""
        self._left, written = iter(self.cases), time.monotonic()
        with self._signals():
            try:
                for number in range(self.size):
                    self._start(Member(number, self.size))
                while self._children:
                    wait([x for c in self._children for x in (c.pipe, c.process.sentinel)], LOOK)
                    for child in list(self._children):
                        self._followed(child)
                    if time.monotonic() > written + PERIOD:
                        written = time.monotonic()
                        self.kept()
            finally:
                for child in list(self._children):
                    self._dismiss(child)
                self.kept()

    def _start(self, member: Member) -> None:
        ours, theirs = Pipe()
        with _pinned(member) if self.pinned else nullcontext():
            # Not a daemon: those may have no children.
            process = spawn_process(_serve, (theirs, self.begin, member, self.memory, self.environment))
        theirs.close()
        self.started += 1
        self._children.append(_Child(member, process, ours))

    def _followed(self, child: _Child) -> None:
        """Hear a child, or notice that it has ended, hangs, or is late."""
        now = time.monotonic()
        if now > self.end + self.grace:
            self._late(child)
        elif child.pipe.poll() or not child.process.is_alive():
            try:
                said = child.pipe.recv()
            except (EOFError, OSError):
                child.process.join(ENDING)
                code = child.process.exitcode
                self._replace(child, *((DEATH, f"the process ended with {code}") if code not in (DONE, BROKEN) else ()))
            else:
                child.since = now
                self._answer(child, said)
        elif now - child.since > self.patience + child.silent:
            self._replace(child, HANG, f"nothing for {now - child.since:.0f} s")

    def _late(self, child: _Child) -> None:
        """End a child whose time is up, also one that never stops talking; what it has said before that counts."""
        child.process.kill()
        child.process.join()
        with suppress(EOFError, OSError):
            while child in self._children and child.pipe.poll():
                self._answer(child, child.pipe.recv())
        if child in self._children:
            self._dismiss(child)
            if child.at is not _NONE:
                self.lost(child.member, child.at, UNFINISHED, "the time is up", child.answered)

    def _answer(self, child: _Child, said: Any) -> None:
        if isinstance(said, _Raised):
            self._replace(child, DEATH, str(said))
        elif isinstance(said, RammerError):
            if isinstance(said, Machinery) or not self._begun:
                raise said
            self._replace(child, DEATH, str(said))
        elif not isinstance(said, _Ask):
            part, child.silent = said
            child.answered = True
            self.heard(child.member, part)
        else:
            if said is _Ask.CASE:
                self._begun, child.answered, child.silent = True, False, 0.0
                child.at = _NONE if self.over else next(self._left, _NONE)
                if child.at is _NONE:
                    self._dismiss(child)
                    return
            with suppress(OSError):  # it may have ended, which is seen next
                child.pipe.send((child.at, self._news[child.known :]))
            child.known = len(self._news)

    def _dismiss(self, child: _Child) -> None:
        child.process.kill()
        child.process.join()
        child.pipe.close()
        self._children.remove(child)

    def _replace(self, child: _Child, kind: str = "", why: str = "") -> None:
        """End a child, tell of its case if that is lost, and start another in its place."""
        self._dismiss(child)
        if kind and child.at is _NONE:
            self._false_starts += 1
            if self._false_starts > FALSE_STARTS + self.size:
                raise Machinery(f"processes end before their first case: {why}")
        elif kind:
            self.lost(child.member, child.at, kind, why, child.answered)
        if not self.over:
            self._start(Member(child.member.number, self.size, child.member.turn + 1))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Control-C end the search with what there is; elsewhere than in the main thread nobody gets them."""

        def stop(number: int, frame: object) -> None:
            self.stop()
            signal.signal(number, before[signal.Signals(number)])

        numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        before = {s: signal.signal(s, stop) for s in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _pinned(member: Member) -> Iterator[None]:
    """What is started here sees two to four of the cores."""
    allowed = os.sched_getaffinity(0) if member.size > 1 and hasattr(os, "sched_getaffinity") else set[int]()
    if allowed:
        few_cores(member.number * len(allowed) // member.size, 2 + member.number % 3)
    try:
        yield
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)


def _serve(pipe: Connection, begin: Begin, member: Member, memory: int, environment: Mapping[str, str]) -> None:
    """The child: begins, and works at cases until the line ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    end_with_parent()
    os.environ.update(environment)
    try:
        _work(Line(pipe), begin, member, memory)
    except Exception as error:  # whatever a search does not catch is told, with its traceback
        pipe.send(_Raised.by(error))


def _work(line: Line, begin: Begin, member: Member, memory: int) -> None:
    try:
        work = begin(member)
    except RammerError as error:
        line.pipe.send(error)
        return
    if memory:
        limit_memory(memory)
    while True:
        try:
            work(line.case(), line)
        except Machinery as error:
            line.pipe.send(error)
            return
