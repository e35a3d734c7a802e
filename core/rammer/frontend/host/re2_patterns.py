"""Regular expressions in RE2's syntax, matched in time linear in the text: the longest of the leftmost matches.

A pattern is compiled to a non-deterministic automaton whose states advance together, one character at a time, so exponential time
is impossible. Groups, laziness and names are accepted and do not change which text matches."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, TypeAlias

#: Limits of a pattern: steps of its automaton, and of a counted repetition as in RE2.
MAX_STEPS: Final = 20_000
MAX_REPEAT: Final = 1000
#: Maximum nesting depth of groups.
MAX_DEPTH: Final = 100

Match: TypeAlias = "tuple[int, int]"
Test: TypeAlias = Callable[[str], bool]

_DIGITS: Final = frozenset("0123456789")
_WORDS: Final = frozenset("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz")
_SPACES: Final = frozenset("\t\n\f\r ")
_SHORT: Final = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_CONTROL: Final = {"a": "\a", "f": "\f", "t": "\t", "n": "\n", "r": "\r", "v": "\v"}
_LOWER: Final = frozenset("abcdefghijklmnopqrstuvwxyz")
_UPPER: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_PUNCTUATION: Final = frozenset(c for c in map(chr, range(33, 127)) if c not in _LOWER | _UPPER | _DIGITS)
_POSIX: Final = {
    "alnum": _LOWER | _UPPER | _DIGITS,
    "alpha": _LOWER | _UPPER,
    "ascii": frozenset(map(chr, range(128))),
    "blank": frozenset("\t "),
    "cntrl": frozenset(map(chr, (*range(32), 127))),
    "digit": _DIGITS,
    "graph": _LOWER | _UPPER | _DIGITS | _PUNCTUATION,
    "lower": _LOWER,
    "print": _LOWER | _UPPER | _DIGITS | _PUNCTUATION | {" "},
    "punct": _PUNCTUATION,
    "space": _SPACES | {"\v"},
    "upper": _UPPER,
    "word": _WORDS,
    "xdigit": _DIGITS | frozenset("abcdefABCDEF"),
}


class PatternError(ValueError):
    """Error for a pattern that RE2 rejects, or an unsupported form."""


@dataclass(frozen=True)
class CharSet:
    """A set of characters: single ones, ranges of code points, and character predicates; or its complement."""

    chars: frozenset[str] = frozenset()
    ranges: tuple[tuple[int, int], ...] = ()
    tests: tuple[Test, ...] = ()
    others: bool = False
    folded: bool = False

    def __contains__(self, char: str) -> bool:
        forms = {char, char.lower(), char.upper()} if self.folded else (char,)
        return any(self._has_char(form) for form in forms if len(form) == 1) != self.others

    def _has_char(self, char: str) -> bool:
        if char in self.chars:
            return True
        code = ord(char)
        return any(low <= code <= high for low, high in self.ranges) or any(test(char) for test in self.tests)


#: A step of the automaton with its next steps. The first item is a set of characters, the name of an assertion, or None for a
#: branch to both next steps.
_Step: TypeAlias = "tuple[CharSet | str | None, int, int]"


@dataclass
class Pattern:
    """A compiled pattern. Step 0 is the accepting step."""

    steps: list[_Step]
    start: int

    def search(self, text: str, begin: int = 0) -> Match | None:
        """Return the leftmost longest match in ``text`` from ``begin`` on; earlier text counts for assertions."""
        best: Match | None = None
        current: dict[int, int] = {}
        for place in range(begin, len(text) + 1):
            starts = sorted(current.items(), key=lambda item: item[1])
            if best is None:
                starts.append((self.start, place))
            reached: dict[int, int] = {}
            for step, first in starts:
                if best is None or first <= best[0]:
                    self._add_closure(step, first, text, place, reached)
            if 0 in reached and (best is None or reached[0] <= best[0]):
                best = (reached.pop(0), place)
            if place == len(text):
                break
            current = {}
            for step, first in reached.items():
                chars, following, _ = self.steps[step]
                if isinstance(chars, CharSet) and text[place] in chars and first < current.get(following, len(text) + 1):
                    current[following] = first
            if best is not None and not any(first <= best[0] for first in current.values()):
                break
        return best

    def _add_closure(self, step: int, first: int, text: str, place: int, reached: dict[int, int]) -> None:
        """Add the steps that ``step`` reaches without consuming a character."""
        waiting = [step]
        while waiting:
            step = waiting.pop()
            if reached.get(step, len(text) + 1) <= first:
                continue
            reached[step] = first
            kind, one, two = self.steps[step]
            if step and kind is None:
                waiting += [two, one]
            elif isinstance(kind, str) and _is_satisfied(kind, text, place):
                waiting.append(one)


def _is_satisfied(assertion: str, text: str, place: int) -> bool:
    if assertion in ("b", "B"):
        before, after = (place > 0 and text[place - 1] in _WORDS), (place < len(text) and text[place] in _WORDS)
        return (before != after) == (assertion == "b")
    if assertion in ("begin", "line begin"):
        return place == 0 or (assertion == "line begin" and text[place - 1] == "\n")
    return place == len(text) or (assertion == "line end" and text[place] == "\n")


@lru_cache(maxsize=256)
def compiled_pattern(source: str) -> Pattern:
    """Return the automaton of a pattern. Raises PatternError."""
    reader = _Reader(source)
    tree = reader.alternatives()
    if reader.place < len(source):
        raise PatternError(f"unexpected {source[reader.place]!r} at {reader.place} of the pattern {source!r}")
    builder = _Builder()
    return Pattern(builder.steps, builder.build(tree, 0))


@dataclass(frozen=True)
class _Node:
    """A part of a pattern: ``chars``, ``assert``, ``sequence``, ``choice`` or ``repeat`` (least, most or None)."""

    kind: str
    parts: tuple[_Node, ...] = ()
    chars: CharSet | str = ""
    least: int = 0
    most: int | None = None


@dataclass
class _Builder:
    steps: list[_Step] = field(default_factory=lambda: [(None, 0, 0)])

    def add(self, kind: CharSet | str | None, one: int, two: int = 0) -> int:
        if len(self.steps) >= MAX_STEPS:
            raise PatternError(f"the pattern needs more than {MAX_STEPS} steps")
        self.steps.append((kind, one, two))
        return len(self.steps) - 1

    def build(self, node: _Node, following: int) -> int:
        """Add the steps of ``node`` and return the first one; ``following`` is the step after it."""
        if node.kind in ("chars", "assert"):
            return self.add(node.chars, following)
        if node.kind == "sequence":
            for part in reversed(node.parts):
                following = self.build(part, following)
            return following
        if node.kind == "choice":
            first = self.build(node.parts[-1], following)
            for part in reversed(node.parts[:-1]):
                first = self.add(None, self.build(part, following), first)
            return first
        (part,) = node.parts
        if node.most is None:
            loop = self.add(None, 0, following)
            self.steps[loop] = (None, self.build(part, loop), following)
            following = loop
        else:
            end = following
            for _ in range(node.most - node.least):
                following = self.add(None, self.build(part, following), end)
        for _ in range(node.least):
            following = self.build(part, following)
        return following


@dataclass
class _Reader:
    """A parser of patterns; ``flags`` are those that apply at its position."""

    source: str
    place: int = 0
    flags: frozenset[str] = frozenset()
    depth: int = 0

    def failed(self, what: str) -> PatternError:
        return PatternError(f"{what} at {self.place} of the pattern {self.source!r}")

    def peek(self, text: str) -> bool:
        return self.source.startswith(text, self.place)

    def taken(self, text: str) -> bool:
        if not self.peek(text):
            return False
        self.place += len(text)
        return True

    def char(self) -> str:
        if self.place >= len(self.source):
            raise self.failed("missing character")
        self.place += 1
        return self.source[self.place - 1]

    def until(self, end: str) -> str:
        found = self.source.find(end, self.place)
        if found < 0:
            raise self.failed(f"missing {end!r}")
        text, self.place = self.source[self.place : found], found + len(end)
        return text

    def alternatives(self) -> _Node:
        branches = [self.sequence()]
        while self.taken("|"):
            branches.append(self.sequence())
        return branches[0] if len(branches) == 1 else _Node("choice", tuple(branches))

    def sequence(self) -> _Node:
        parts = list[_Node]()
        while self.place < len(self.source) and not self.peek("|") and not self.peek(")"):
            if self.taken("\\Q"):
                end = self.source.find("\\E", self.place)
                text = self.source[self.place :] if end < 0 else self.until("\\E")
                self.place = len(self.source) if end < 0 else self.place
                parts += [self._char_node(CharSet(frozenset(c))) for c in text]
                continue
            part = self.atom()
            if part is not None:
                parts.append(self.repeated(part))
        return parts[0] if len(parts) == 1 else _Node("sequence", tuple(parts))

    def repeated(self, part: _Node) -> _Node:
        bounds = self.bounds()
        if bounds is None:
            return part
        self.taken("?")  # laziness does not change the longest match
        part = _Node("repeat", (part,), least=bounds[0], most=bounds[1])
        again = self.place
        if self.bounds() is not None:
            self.place = again
            raise self.failed("repetition of a repetition")
        return part

    def bounds(self) -> tuple[int, int | None] | None:
        """Read a repetition of the preceding part. Returns None if it is not repeated."""
        for text, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.taken(text):
                return bounds
        end = self.source.find("}", self.place)
        inside = self.source[self.place + 1 : end] if self.peek("{") and end >= 0 else ""
        least, comma, most = inside.partition(",")
        if not least.isdecimal() or not (most.isdecimal() or not most):
            return None
        self.place = end + 1
        last = (int(most) if most else None) if comma else int(least)
        if int(least) > MAX_REPEAT or (last is not None and not int(least) <= last <= MAX_REPEAT):
            raise self.failed(f"invalid repetition {{{inside}}}")
        return int(least), last

    def atom(self) -> _Node | None:
        """Read one part. Returns None for flags, which apply from there on."""
        char = self.char()
        if char == "(":
            return self.group()
        if char == "[":
            return self._char_node(self.bracket())
        if char == ".":
            return self._char_node(CharSet(others=True) if "s" in self.flags else CharSet(frozenset("\n"), others=True))
        if char in "^$":
            name = "begin" if char == "^" else "end"
            return _Node("assert", chars=f"line {name}" if "m" in self.flags else name)
        if char in "*+?":
            raise self.failed(f"nothing to repeat by {char!r}")
        if char != "\\":
            return self._char_node(CharSet(frozenset(char)))
        char = self.char()
        if char in "bB":
            return _Node("assert", chars=char)
        if char in "Az":
            return _Node("assert", chars="begin" if char == "A" else "end")
        return self._char_node(self.escape(char))

    def _char_node(self, chars: CharSet) -> _Node:
        if "i" in self.flags:
            chars = CharSet(chars.chars, chars.ranges, chars.tests, chars.others, True)
        return _Node("chars", chars=chars)

    def group(self) -> _Node | None:
        outer = self.flags
        if self.taken("?"):
            if self.taken("P<") or self.taken("<"):
                if not self.until(">").replace("_", "a").isalnum():
                    raise self.failed("invalid name of a group")
            else:
                flags = self.flag_letters()
                if self.taken(")"):
                    self.flags = flags
                    return None
                if not self.taken(":"):
                    raise self.failed("unsupported group")
                self.flags = flags
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.failed(f"more than {MAX_DEPTH} nested groups")
        inside = self.alternatives()
        if not self.taken(")"):
            raise self.failed("missing ')'")
        self.flags, self.depth = outer, self.depth - 1
        return inside

    def flag_letters(self) -> frozenset[str]:
        flags, on = set(self.flags), True
        while self.place < len(self.source) and self.source[self.place] not in ":)":
            letter = self.char()
            if letter == "-":
                on = False
            elif letter in "imsU":
                (flags.add if on else flags.discard)(letter)
            else:
                raise self.failed(f"unsupported flag {letter!r}")
        return frozenset(flags)

    def bracket(self) -> CharSet:
        others, parts, first = self.taken("^"), list[CharSet](), True
        while first or not self.peek("]"):
            first = False
            if self.peek("[:") and ":]" in self.source[self.place :]:
                self.place += 2
                parts.append(self.named_class(self.until(":]")))
                continue
            low = self.member()
            if len(low.chars) == 1 and not low.others and self.peek("-") and self.source[self.place + 1 : self.place + 2] != "]":
                self.place += 1
                high = self.member()
                one, two = min(low.chars), min(high.chars, default="")
                if len(high.chars) != 1 or high.others or two < one:
                    raise self.failed("invalid range of characters")
                low = CharSet(ranges=((ord(one), ord(two)),))
            parts.append(low)
        self.place += 1
        plain = [p for p in parts if not p.others]
        tests = tuple(p.__contains__ for p in parts if p.others)
        chars = frozenset().union(*(p.chars for p in plain))
        return CharSet(chars, sum((p.ranges for p in plain), ()), sum((p.tests for p in plain), ()) + tests, others)

    def named_class(self, name: str) -> CharSet:
        others = name.startswith("^")
        if name.removeprefix("^") not in _POSIX:
            raise self.failed(f"unknown class {name!r}")
        return CharSet(_POSIX[name.removeprefix("^")], others=others)

    def member(self) -> CharSet:
        """Read one character or class inside brackets."""
        char = self.char()
        return self.escape(self.char()) if char == "\\" else CharSet(frozenset(char))

    def escape(self, char: str) -> CharSet:
        if char.lower() in _SHORT:
            return CharSet(_SHORT[char.lower()], others=char.isupper())
        if char in _CONTROL:
            return CharSet(frozenset(_CONTROL[char]))
        if char in "pP":
            return self.category(char == "P")
        if char == "x":
            digits = self.until("}") if self.taken("{") else self.char() + self.char()
            return CharSet(frozenset(self.code(digits, 16)))
        if char in "01234567":
            digits = char
            while len(digits) < 3 and self.source[self.place : self.place + 1] in tuple("01234567"):
                digits += self.char()
            if char != "0" and len(digits) == 1:
                raise self.failed("unsupported reference to a group")
            return CharSet(frozenset(self.code(digits, 8)))
        if char.isalnum() and char.isascii():
            raise self.failed(f"unsupported escape \\{char}")
        return CharSet(frozenset(char))

    def code(self, digits: str, base: int) -> str:
        try:
            return chr(int(digits, base))
        except (ValueError, OverflowError):
            raise self.failed(f"invalid code {digits!r} of a character") from None

    def category(self, others: bool) -> CharSet:
        """Read a Unicode general category; scripts are not supported."""
        name = self.until("}") if self.taken("{") else self.char()
        others ^= name.startswith("^")
        name = name.removeprefix("^")
        known = name and name[0] in "CLMNPSZ" and (len(name) == 1 or (len(name) == 2 and name[1].islower()))
        if not known:
            raise self.failed(f"unsupported class of characters {name!r}")
        return CharSet(tests=(lambda c: unicodedata.category(c).startswith(name),), others=others)
