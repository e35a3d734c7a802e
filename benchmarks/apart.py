"""Whole models over hosts that are apart: cut in two and in three, the same as one device, and what crossed.

python benchmarks/apart.py --markdown results/cpu_apart.md      (network namespaces with 1 ms between them; root; several minutes)

Each model runs on one device, then over two and three hosts, a process each, by the transport that is taken; outputs are
compared with those of the one device. What crosses is counted in every process, a run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import onnx
from delayed import Hosts, far_apart
from entry import run
from facts import environment_of, meanwhile, section
from zoo.cnn import squeezenet
from zoo.sequence import bert_base, lstm_tc

from rammer.report.table import duration, markdown

#: Models by name. The simulator takes seconds for what a processor does in milliseconds, so they are no larger.
CASES: Final[dict[str, Callable[[], onnx.ModelProto]]] = {
    "SqueezeNet, 64x64, channels / 4": lambda: squeezenet(0, size=64, part=4),
    "LSTM, 4 layers of 128, 24 steps": lambda: lstm_tc(0, layers=4, hidden=128, steps=24),
    "BERT layer, 64 tokens": lambda: bert_base(0, layers=1, vocabulary=1000, tokens=64),
}
OPTIONS: Final = {"rocm": [], "ipu_sim": ["--option", "tiles=64"]}
HOSTS: Final = (2, 3)
HEADERS: Final = (
    *("model", "device", "hosts", "by", "cut", "max abs error", "transfers", "bytes", "payload writes", "flags"),
    *("allocations", "serialisations", "copies", "host copies", "latency"),
)
WORDS: Final = """\
Hosts are network namespaces of this machine between which a process holds every packet back for {delay:g} ms each way. *Max abs
error* is against the same device alone. *Payload writes* and all after it are of one run, of all processes together: of each
transfer one payload and two flags (its own, and the slot given back). *Latency* is the median of runs one after the other,
from the inputs to the outputs.
"""


@click.command(help=__doc__)
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the page.")
@click.option("--delay", default=1.0, show_default=True, help="Milliseconds each way.")
@click.option("--device", default=",".join(OPTIONS), show_default=True, help="Devices, separated by commas.")
def command(path: Path | None, delay: float, device: str) -> None:
    """Run all, and print."""
    os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    rows = list[list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, made) in enumerate(CASES.items()):
            model = Path(folder, f"{number}.onnx")
            onnx.save(made(), model)
            for own in device.split(","):
                alone = model.with_suffix(f".{own}.npz")
                output([*rammer(model, own), "--save-outputs", str(alone)])
                for count in HOSTS:
                    with far_apart(delay, count) as hosts:
                        rows.append([name, own, str(count), *measured(model, own, alone, hosts)])
                    click.echo("  ".join(rows[-1]))
    if path is not None:
        text = f"{WORDS.format(delay=delay)}{meanwhile()}\n\n{markdown(rows, HEADERS)}\n\n{section(environment_of(gpu=False))}"
        path.write_text(f"# Models over hosts that are apart\n\n{text}")


def rammer(model: Path, device: str) -> list[str]:
    """A command line of one device, which all processes of several have, too."""
    asked = ["--device", device, "--seed", "1", "--iterations", "5", *OPTIONS[device]]
    return [sys.executable, "-P", "-m", "rammer.cli.main", "run", str(model), *asked]


def measured(model: Path, device: str, alone: Path, hosts: Hosts, *more: str) -> list[str]:
    """What a run over ``hosts`` reports, as a row has it. RuntimeError where outputs differ, too."""
    line = [*rammer(model, device), "--expected", str(alone), "--timeout", "60", "--json", "-", *more]
    report: dict[str, Any] = json.loads(output(hosts.mpirun(line)))
    crossed, total = report["transfers"], counted(report)
    error = max((float(d["max abs"]) for d in report["differences"]), default=0.0)
    shown = ("payload_writes", "flag_writes", "allocations", "serialisations", "copies", "host_copies")
    return [
        *(report["transport"], report["how"], f"{error:.2g}", str(len(crossed)), str(sum(t["bytes"] for t in crossed))),
        *(f"{total[n]:g}" for n in shown),
        duration(report["latency_seconds"]),
    ]


def counted(report: dict[str, Any]) -> dict[str, float]:
    """All processes' counters of one run."""
    return {name: sum(c[name] for c in report["counters"]) for name in report["counters"][0]}


def output(line: list[str]) -> str:
    """What a command prints. RuntimeError where it fails."""
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{' '.join(line[:8])} failed: {done.stdout[-1000:]} {done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    """As a script."""
    run(command)


if __name__ == "__main__":
    main()
