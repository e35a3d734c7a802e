"""ONNX Runtime as a reference of the graph search, in a separate process that may crash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rammer_testing.graphs.case import Array
from rammer_testing.peer_process import PeerCrashed, PeerProcess, PeerRefused

#: Seconds for one graph.
PATIENCE: Final = 30.0
#: Consecutive crashes without any answer after which ONNX Runtime is disabled: it is not installed, or does not work here.
HOPELESS: Final = 3


@dataclass
class Outside:
    """ONNX Runtime on one thread, without its graph rewrites, which are not under test."""

    peer: PeerProcess = field(default_factory=PeerProcess)
    deaths: int = 0
    answers: int = 0

    def __call__(self, model: bytes, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array] | None:
        """Return the outputs, or None if ONNX Runtime rejects the model or crashes."""
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
        """End the process of ONNX Runtime."""
        self.peer.close()
