"""Values that were folded on the way to others, let go of behind their last reader: a chain of operators on weights would else be
in memory as a whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from onnx import NodeProto

from rammer.frontend import checks
from rammer.ir.graph import Node

#: Bytes from which it is worth asking whether anybody else reads a value.
WORTH: Final = 1 << 20


@dataclass
class Readers:
    """Who reads the values of a walk over ``order``: a name's last reader, and the constants that operators kept so far have."""

    order: Sequence[NodeProto]
    outputs: Collection[str]
    last: dict[str, int] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    seen: int = 0

    def __post_init__(self) -> None:
        self.last = {n: i for i, proto in enumerate(self.order) for n in checks.node_reads(proto)}

    def passed(
        self, place: int, nodes: Sequence[Node], names: Mapping[str, str], known: MutableMapping[str, np.ndarray[Any, Any]]
    ) -> None:
        """Forget what nobody reads behind the operator at ``place``. ``names`` are those of the Graph by ONNX's."""
        self.kept.update(n for node in nodes[self.seen :] for n in node.inputs)
        self.seen = len(nodes)
        for name in self._unread(place, names):
            if name in known and known[name].nbytes >= WORTH and name not in self.kept and name not in self._later(place, names):
                del known[name]

    def _unread(self, place: int, names: Mapping[str, str]) -> Iterator[str]:
        reads = dict.fromkeys(checks.node_reads(self.order[place]))
        return (names[n] for n in reads if self.last[n] == place and n in names)

    def _later(self, place: int, names: Mapping[str, str]) -> set[str]:
        """What is read later, or is a result: several names may mean one value."""
        read = [*(n for n, i in self.last.items() if i > place), *self.outputs]
        return {names[n] for n in read if n in names}
