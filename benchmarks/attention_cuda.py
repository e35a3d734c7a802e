"""BERT-base with attention as one kernel and as three, and every block of its attention beside its prediction, on a GPU.

``python benchmarks/attention_cuda.py [--precision float16] [--tune quick]``; each side of the comparison has a fresh cache.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

import click
import numpy as np
from zoo.sequence import bert_base

import rammer
from rammer.device.manifest import Binding, OpenOptions
from rammer.ir.operator import ROperator

from rammer_cuda.attention.cost import ATTENTION
from rammer_cuda.attention.recognise import attention_of
from rammer_cuda.backend import CudaBackend, open_backend

#: A rate at which no product is worth holding on chip.
NEVER = 1e-6
#: Timed runs.
RUNS = 200


def side(precision: str, tune: str, apart: bool) -> None:
    """Print the median milliseconds of one side, and how many kernels it is."""
    own, seen = CudaBackend.rate, dict[str, tuple[ROperator, Binding]]()

    def rate(self: CudaBackend, operator: ROperator, binding: Binding) -> float:
        if operator.holds_operand:
            seen.setdefault("first", (operator, binding))
            return NEVER if apart else own(self, operator, binding)
        return own(self, operator, binding)

    CudaBackend.rate = rate  # type: ignore[method-assign]
    rng = np.random.default_rng()
    exe = rammer.compile(bert_base(0), device="cuda", precision=precision, tune=tune)
    ids = {"input_ids": rng.integers(0, 30522, (1, 128)), "token_type_ids": rng.integers(0, 2, (1, 128))}
    bound = exe.bind({n: v.astype(np.int64) for n, v in ids.items()})
    times = [bound.seconds() for _ in range(RUNS)][RUNS // 4 :]
    print(f"{precision} {'three kernels' if apart else 'one kernel'}: {statistics.median(times) * 1e3:.4f} ms", flush=True)
    if not apart and seen:
        blocks(*seen["first"])


def blocks(operator: ROperator, binding: Binding) -> None:
    """Predicted and measured microseconds of every block."""
    backend = open_backend(OpenOptions())
    assert isinstance(backend, CudaBackend)
    print(f"attention of {attention_of(operator, binding).heads} heads; config, predicted and measured us of all its tasks")
    for seconds, tiled in backend.choices(operator, binding, ATTENTION):
        kernel = backend.kernel(tiled, binding)
        _, crowded = backend.profiler.task_time(kernel, binding)
        rounds = -(-tiled.task_count // backend.vdevice.veus)
        print(f"  {dict(tiled.config)} {(seconds - backend.vdevice.launch) * 1e6:.2f} {crowded * rounds * 1e6:.2f}", flush=True)


@click.command()
@click.option("--precision", default="float32")
@click.option("--tune", default="quick")
@click.option("--side", "one", default="", help="Only this side, in this process: one or three.")
def main(precision: str, tune: str, one: str) -> None:
    """Both sides, each in a process with a cache of its own."""
    if one:
        side(precision, tune, one == "three")
        return
    for which in ("three", "one"):
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--precision", precision, "--tune", tune, "--side", which]
            subprocess.run(command, env={**os.environ, "XDG_CACHE_HOME": cache}, check=True)


if __name__ == "__main__":
    main()
