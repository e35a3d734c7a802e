"""ONNX Runtime in a process of its own: some valid graphs end that process, and it must not be ours."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from rammer.testing.cage import end_with_parent
from rammer.testing.graphs.case import Array

#: Seconds for one graph.
PATIENCE: Final = 30.0
#: Deaths without a single answer after which nobody is asked: the package is not installed, or does not work here.
HOPELESS: Final = 3


@dataclass
class Outside:
    """The process, started at its first question and again after it has died."""

    process: Any = None
    pipe: Connection | None = None
    deaths: int = 0
    answers: int = 0

    def __call__(self, model: bytes, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array] | None:
        """The outputs; None where ONNX Runtime does not run the model, or dies of it."""
        if self.deaths >= HOPELESS and not self.answers:
            return None
        pipe = self._started()
        try:
            pipe.send((model, dict(inputs), list(outputs)))
            if pipe.poll(PATIENCE):
                answer: list[Array] | None = pipe.recv()
                self.answers += 1
                return answer
        except (EOFError, OSError):
            pass
        self.deaths += 1
        self.close()
        return None

    def _started(self) -> Connection:
        if self.pipe is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
        return self.pipe

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self.pipe is not None:
            self.pipe.close()
        self.process = self.pipe = None


def _serve(pipe: Connection) -> None:
    import onnxruntime as ort

    end_with_parent()
    ort.set_default_logger_severity(4)
    while True:
        try:
            model, inputs, outputs = pipe.recv()
        except EOFError:
            return
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # Its rewritings are not under test: every operator as the model has it.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            pipe.send(session.run(outputs, inputs))
        except Exception:  # its exceptions derive from Exception only; it lacks this operator, type or opset
            pipe.send(None)
