"""ONNX Runtime as a voice of the search over graphs: what it computes, in a process that may die of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rammer_testing.graphs.case import Array
from rammer_testing.peer_process import PeerCrashed, PeerProcess, PeerRefused

#: Seconds for one graph.
PATIENCE: Final = 30.0
#: Deaths without a single answer after which ONNX Runtime is not asked again: it is not installed, or does not work here.
HOPELESS: Final = 3


@dataclass
class Outside:
    """ONNX Runtime without its own graph rewrites, which are not under test, on one thread."""

    peer: PeerProcess = field(default_factory=PeerProcess)
    deaths: int = 0
    answers: int = 0

    def __call__(self, model: bytes, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array] | None:
        """The outputs; None where ONNX Runtime does not run the model, or dies of it."""
        if self.deaths >= HOPELESS and not self.answers:
            return None
        try:
            self.peer.ask(("open", 0, model, False, 1), PATIENCE)
            answer: list[Array] = self.peer.ask(("run", 0, list(outputs), dict(inputs)), PATIENCE)
        except PeerRefused:  # it lacks this operator, type or opset
            self.answers += 1
            return None
        except PeerCrashed:
            self.deaths += 1
            return None
        self.answers += 1
        return answer

    def close(self) -> None:
        """End the process."""
        self.peer.close()
