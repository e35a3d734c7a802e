"""ONNX Runtime in a separate process, since some valid models crash it.

``PeerSession`` has the methods of ``onnxruntime.InferenceSession`` that tests use. If the process crashes, the test has no
reference and is skipped; the signal is the reason."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx

from rammer.child_processes import spawn_process
from rammer_testing.sandbox import end_with_parent

__all__ = ["SHARED", "PeerCrashed", "PeerPort", "PeerProcess", "PeerRefused", "PeerSession"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class PeerCrashed(Exception):
    """ONNX Runtime's process ended, or did not answer in time. ``rammer_testing.machine`` skips the test that raises it."""


class PeerRefused(Exception):
    """An exception of ONNX Runtime, with its text."""


class PeerPort(NamedTuple):
    """An input or output as ONNX Runtime describes it; unknown extents are names or None."""

    name: str
    shape: list[int | str | None]
    type: str


@dataclass
class PeerProcess:
    """The process of ONNX Runtime. The first request starts it, as does the first request after a crash. Its sessions end with it
    (``generation``)."""

    generation: int = 0
    process: Any = None
    pipe: Connection | None = field(default=None, repr=False)

    def ask(self, request: tuple[Any, ...], seconds: float | None = None) -> Any:
        """Return the answer to a request. Raises PeerRefused with the text of ONNX Runtime's exception, and PeerCrashed if the
        process ends or needs more than ``seconds``."""
        pipe = self.start()
        try:
            pipe.send(request)
            if pipe.poll(seconds):
                good, answer = pipe.recv()
                if not good:
                    raise PeerRefused(answer)
                return answer
            why = f"gave no answer in {seconds:.0f} s"
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            why = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.close()
        raise PeerCrashed(f"ONNX Runtime's process {why}: there is no reference")

    def start(self) -> Connection:
        """Start the process unless it runs, and return its pipe."""
        if self.pipe is None:
            self.pipe, theirs = Pipe()
            self.process = spawn_process(_serve, (theirs,), daemon=True)
            self.generation += 1
            theirs.close()
        return self.pipe

    def close(self) -> None:
        """End the process of ONNX Runtime."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self.pipe is not None:
            self.pipe.close()
        self.process = self.pipe = None


#: The shared process of all sessions.
SHARED = PeerProcess()
_KEYS = count()
#: Keys of collected sessions, to be closed before the next request: a finalizer may run in the middle of a request.
_GONE: list[int] = []


class PeerSession:
    """A CPU session of ONNX Runtime for a model (its bytes or path) in the shared peer process. ONNX Runtime's graph rewrites are
    enabled only if ``optimised``. ``threads`` is ``intra_op_num_threads`` (0: ONNX Runtime's default)."""

    def __init__(self, model: bytes | str | os.PathLike[str] | onnx.ModelProto, optimised: bool = True, threads: int = 0) -> None:
        self.key = next(_KEYS)
        source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
        source = source if isinstance(source, bytes) else os.path.abspath(source)
        self._opening = ("open", self.key, source, optimised, threads)
        self._generation, self._inputs, self._outputs = 0, list[PeerPort](), list[PeerPort]()
        self._open()

    def _open(self) -> None:
        while _GONE and SHARED.pipe is not None:
            SHARED.ask(("close", _GONE.pop()))
        SHARED.start()
        if self._generation != SHARED.generation:
            self._generation = SHARED.generation
            inputs, outputs = SHARED.ask(self._opening)
            self._inputs, self._outputs = ([PeerPort(*port) for port in ports] for ports in (inputs, outputs))

    def get_inputs(self) -> list[PeerPort]:
        """Return the model's inputs."""
        return self._inputs

    def get_outputs(self) -> list[PeerPort]:
        """Return the model's outputs."""
        return self._outputs

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Return the outputs ``names`` (None: all outputs)."""
        self._open()
        answer: list[Any] = SHARED.ask(("run", self.key, names and list(names), dict(feeds)))
        return answer

    def __del__(self) -> None:
        _GONE.append(self.key)


def _serve(pipe: Connection) -> None:
    """Answer requests until the peer closes the pipe."""
    end_with_parent()
    sessions: dict[int, Any] = {}
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, _answer(sessions, *request)))
        except Exception as problem:  # ONNX Runtime's exceptions derive from Exception only
            pipe.send((False, f"{type(problem).__name__}: {problem}"))


def _answer(sessions: dict[int, Any], what: str, key: int, *given: Any) -> Any:
    import onnxruntime

    if what == "open":
        source, optimised, threads = given
        options = onnxruntime.SessionOptions()
        # Without VNNI, sums of two products of uint8 and int8 would saturate at 16 bits.
        options.add_session_config_entry("session.x64quantprecision", "1")
        options.log_severity_level, options.intra_op_num_threads = 4, threads
        if not optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = sessions[key] = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        return [[(p.name, p.shape, p.type) for p in ports] for ports in (session.get_inputs(), session.get_outputs())]
    if what == "run":
        return sessions[key].run(*given)
    return sessions.pop(key, None) and None
