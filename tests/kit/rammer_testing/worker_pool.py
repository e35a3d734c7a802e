"""A pool of child processes for parallel searches: started, fed with cases, monitored and replaced.

A child that dies or is silent for too long loses only its current case. The case is reported to the search, and a new child
replaces the old one. Messages of a child count immediately, so its death loses none of them. The end time holds whatever the
children do. SIGTERM or Control-C brings it forward, and a second one aborts. A child never outlives its parent.
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

#: Seconds for a child to start: many of them read the same packages at once.
BEGINNING: Final = 90.0
#: Seconds for a child to exit after closing its pipe.
ENDING: Final = 5.0
#: Children that may die before their first case, in addition to one per place.
FALSE_STARTS: Final = 3
#: Seconds between polls of the children, and between reports of intermediate results.
LOOK, PERIOD = 0.2, 5.0
#: Exit codes of a child that leaves to be replaced. The second means that its device may be broken.
DONE, BROKEN = 0, 3
#: Reasons for unfinished cases, as reported to the search.
HANG, DEATH, UNFINISHED = "hang", "death", "unfinished"


class _Ask(Enum):
    CASE = "a case"
    NEWS = "what others have found"


_NONE: Final = _Ask.CASE  # marks the absence of a case: None may be a case


def check_tried(count: int, what: str, seconds: float) -> None:
    """Raise BadInput if a search tried nothing: its empty table would look like success."""
    if not count:
        raise BadInput(
            f"no {what} was tried in {seconds:.0f} s",
            hint="give more --seconds: opening the device, and making what is searched, takes the first of them",
        )


@dataclass(frozen=True)
class _Raised:
    """The final message of a child that an exception ended: the exception and its traceback."""

    what: str
    trace: str

    @classmethod
    def by(cls, error: Exception) -> _Raised:
        """Return the message for ``error``, as Python prints it."""
        return cls(traceback.format_exception_only(error)[-1].strip(), "".join(traceback.format_exception(error)).rstrip())

    def __str__(self) -> str:
        return f"the process ended by {self.what}\n{self.trace}"


@dataclass(frozen=True)
class Member:
    """A place in the crew: its number, the number of places, and the number of its previous children."""

    number: int
    size: int
    turn: int = 0

    @property
    def seed(self) -> str:
        """The seed that makes this child's random numbers unique."""
        return f"{self.number}.{self.size}.{self.turn}"


@dataclass
class Line:
    """The child's end of its pipe to the parent. If the pipe closes, the child exits: its results are no longer needed."""

    pipe: Connection
    _fresh: list[Any] = field(default_factory=list)

    def tell(self, part: Any, silent: float = 0.0) -> None:
        """Report a part of the case's results. ``silent``: seconds beyond the usual patience until the next message."""
        self._say((part, silent))

    def news(self) -> list[Any]:
        """Return the items spread since the last call."""
        self._asked(_Ask.NEWS)
        news, self._fresh = self._fresh, []
        return news

    def case(self) -> Any:
        """Return the next case from the parent."""
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


#: The function that a child runs for each case, and the function that first sets it up. A RammerError of the latter, or Machinery
#: at any time, ends the search if no child has started.
Work: TypeAlias = Callable[[Any, Line], None]
Begin: TypeAlias = Callable[[Member], Work]


def leave(code: int = DONE) -> NoReturn:
    """End this child so that another replaces it. Library exit handlers are skipped."""
    os._exit(code)


@dataclass
class _Child:
    """The parent's view of a child. ``at`` is its current case, ``since`` the time of its last message, and ``silent`` its extra
    seconds of silence. ``answered`` is True once it reported on the case. ``known`` counts the news items that it received."""

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
    """A crew of ``size`` children that work on ``cases`` until these are exhausted or ``end`` (of ``time.monotonic``) has passed.

    Each child calls ``begin`` (which is pickled). Children still working ``grace`` seconds after the end are killed.
    ``heard(member, part)`` receives the messages. ``lost(member, case, kind, why, answered)`` receives unfinished cases; for an
    exception ``why`` also has its traceback. ``kept()`` is called every few seconds and at the end. ``memory`` limits the address
    space in bytes that a child may add after its start; 0 is unlimited. With ``pinned`` each child sees two to four cores:
    runtimes that start one thread per core would compete."""

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
        """Return True if new cases must not start."""
        return time.monotonic() > self.end

    @property
    def running(self) -> int:
        """The number of live children."""
        return len(self._children)

    def stop(self, grace: float | None = None) -> None:
        """Start no further cases from now on."""
        self.end, self.grace = min(self.end, time.monotonic()), self.grace if grace is None else grace

    def spread(self, item: Any) -> None:
        """Send ``item`` to every child with its next case, or when it asks for news."""
        self._news.append(item)

    def run(self) -> None:
        """Run the whole search. Raises RammerError if no child can start."""
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
            # Not a daemon: daemons cannot have children.
            process = spawn_process(_serve, (theirs, self.begin, member, self.memory, self.environment))
        theirs.close()
        self.started += 1
        self._children.append(_Child(member, process, ours))

    def _followed(self, child: _Child) -> None:
        """Handle a message of a child, its exit, a hang, or the end of its time."""
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
        """End a child whose time is up, even one that keeps sending; its earlier messages count."""
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
            with suppress(OSError):  # it may have ended, which the next poll detects
                child.pipe.send((child.at, self._news[child.known :]))
            child.known = len(self._news)

    def _dismiss(self, child: _Child) -> None:
        child.process.kill()
        child.process.join()
        child.pipe.close()
        self._children.remove(child)

    def _replace(self, child: _Child, kind: str = "", why: str = "") -> None:
        """End a child, report its case if lost, and start a replacement."""
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
        """Stop the search on SIGTERM and Control-C and keep its results. Handlers are installed in the main thread only."""

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
    """Limit processes started in this context to two to four cores."""
    allowed = os.sched_getaffinity(0) if member.size > 1 and hasattr(os, "sched_getaffinity") else set[int]()
    if allowed:
        few_cores(member.number * len(allowed) // member.size, 2 + member.number % 3)
    try:
        yield
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)


def _serve(pipe: Connection, begin: Begin, member: Member, memory: int, environment: Mapping[str, str]) -> None:
    """Start the child's work and process cases until the pipe closes."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    end_with_parent()
    os.environ.update(environment)
    try:
        _work(Line(pipe), begin, member, memory)
    except Exception as error:  # errors that a search does not catch are reported, with traceback
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
