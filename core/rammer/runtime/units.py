"""Which unit of its host each process of a run over several devices has, where users name none."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["numbered"]


def numbered(names: Sequence[str], hosts: Sequence[int], units: Sequence[int]) -> tuple[str, ...]:
    """``names`` of devices, a process each, with the number of a unit where a process sees several and none is named: those that
    no process of the host names go to its processes in order. Where they are too few they begin again, which whoever joins the
    devices may refuse. ``hosts`` says where each process is, ``units`` how many units of its device it sees."""
    return tuple(_numbered(number, names, hosts, units[number]) for number in range(len(names)))


def _numbered(number: int, names: Sequence[str], hosts: Sequence[int], units: int) -> str:
    name = names[number]
    if ":" in name or units < 2:
        return name
    here = [(k, n) for k, n in enumerate(names) if hosts[k] == hosts[number]]
    taken = {place for _, n in here for plain, _, place in [n.partition(":")] if plain == name}
    free = [str(u) for u in range(units) if str(u) not in taken] or [str(u) for u in range(units)]
    before = sum(k < number and n == name for k, n in here)
    return f"{name}:{free[before % len(free)]}"
