"""The command line and the tables of ``transfers.py``."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from entry import run
from facts import environment_of, meanwhile, section
from transfers import AHEAD, KINDS, SIZES, measured

from rammer.report.text_table import format_duration, format_size, markdown_table
from rammer_testing.distant_hosts import far_apart

CALLS = ("pickled", "gRPC")
ALONE = ("between", "tensor", *KINDS, "pickled / ours", "gRPC / ours", "pickled / socket", "gRPC / socket", "ours, known")
STREAM = (
    *("between", "tensor", "in flight", *KINDS, "pickled / ours", "gRPC / ours"),
    *("pickled, one by one", "gRPC, one by one", "pickled one by one / ours", "gRPC one by one / ours"),
)
COST = ("between", "tensor", *KINDS)

#: Explanation of the tables on the page.
WORDS = """\
*ours* is transport `mpi` between processes of one machine (shared memory) and `messages` between network namespaces, where a
process holds every packet back, each way; there *mpi* is beside it, with Open MPI's `--mca osc pt2pt`. *pickled* is an array
through `multiprocessing.connection` and a word back, *gRPC* a unary call with the array's bytes. *socket* is a plain socket
with nothing around it, received into one array: the floor. Between processes it and the peers are Unix sockets.
"""
APART = """\
One tensor alone: ours and the socket until the reader may read it (both sides have one clock), a call until its answer is
there, which is what a reader that asks for a tensor waits for. *ours, known* is until the sender knows that its slot is free
again. *pickled / socket* and *gRPC / socket* are how many times faster than a call anything over this network can be: where
that is below 3, so is every transport.
"""
MANY = """\
A stream: seconds a tensor, so many in flight: slots of ours, and calls of theirs. *One by one* is each call after the answer
of the one before it.
"""
SPENT = "The processor's time for a tensor of that stream, both sides and all their threads; `mpi` polls while it waits.\n"


@click.command(help=__doc__)
@click.option("--markdown", "path", type=click.Path(path_type=Path), help="Write the page.")
@click.option("--json", "raw", type=click.Path(path_type=Path), help="Write seconds as JSON.")
@click.option(
    "--delay", type=float, default=0.0, help="And between two namespaces, with so many milliseconds each way (needs root)."
)
@click.option("--grpc", "python", default=sys.executable, help="An interpreter that has grpcio.")
@click.option("--rounds", default=3, show_default=True, help="Turns of all kinds; the least of each counts.")
def command(path: Path | None, raw: Path | None, delay: float, python: str, rounds: int) -> None:
    """Measure all kinds alternately and print the tables."""
    tables: tuple[list[list[str]], ...] = ([], [], [])
    found = dict[str, Any]()
    for where, far in (("processes", False), *([(f"namespaces, {delay:g} ms", True)] if delay else [])):
        with far_apart(delay) if far else nullcontext() as hosts:
            turns = [{kind: measured(kind, hosts, python) for kind in KINDS} for _ in range(rounds)]
        found[where] = {k: _least([t[k] for t in turns]) for k in KINDS}
        found[f"{where}, counted"] = turns[0]["ours"]["counters"] if turns[0]["ours"] else ""
        for nbytes in SIZES:
            at = {k: v[str(nbytes)] if v else {} for k, v in found[where].items()}
            for table, row in zip(tables, (_alone(at), _stream(at, nbytes), _cost(at)), strict=True):
                table.append([where, format_size(nbytes), *row])
    texts = [markdown_table(rows, headers) for rows, headers in zip(tables, (ALONE, STREAM, COST), strict=True)]
    click.echo("\n\n".join(texts))
    if raw is not None:
        raw.write_text(json.dumps(found, indent=2) + "\n")
    if path is not None:
        path.write_text(_page(texts, found, rounds))


def _least(runs: list[dict[str, Any] | None]) -> dict[str, dict[str, float]] | None:
    """Return the least of each number, by size."""
    there = [r["found"] for r in runs if r is not None]
    return {n: {what: min(r[n][what] for r in there) for what in there[0][n]} for n in there[0]} if there else None


Times = dict[str, dict[str, float]]


def _alone(at: Times) -> list[str]:
    ratios = [_ratio(at[k].get("alone"), at[of].get("alone")) for of in ("ours", "socket") for k in CALLS]
    return [*(_time(at[k].get("alone")) for k in KINDS), *ratios, _time(at["ours"]["back"])]


def _stream(at: Times, nbytes: int) -> list[str]:
    own, one = at["ours"]["stream"], [at[k].get("one by one") for k in CALLS]
    ratios = [_ratio(at[k].get("stream"), own) for k in CALLS]
    return [
        *(str(AHEAD[nbytes]), *(_time(at[k].get("stream")) for k in KINDS), *ratios),
        *(_time(s) for s in one),
        *(_ratio(s, own) for s in one),
    ]


def _cost(at: Times) -> list[str]:
    return [_time(at[k].get("cpu")) for k in KINDS]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def _ratio(theirs: float | None, own: float | None) -> str:
    return "-" if theirs is None or own is None else f"{theirs / own:.1f}x"


def _page(texts: list[str], found: dict[str, Any], rounds: int) -> str:
    said = [f"- {k}: {v}" for k, v in found.items() if k.endswith("counted")]
    parts = [
        "# One tensor from process to process",
        f"{WORDS}\nMedians of one alone, means of streams; of {rounds} turns of all kinds the least. {meanwhile()}",
        f"{APART}\n{texts[0]}",
        f"{MANY}\n{texts[1]}",
        f"{SPENT}\n{texts[2]}",
        "Ours counted, the sender:\n\n" + "\n".join(said),
    ]
    return "\n\n".join(parts) + f"\n\n{section(environment_of(gpu=False))}"


def main() -> None:
    """Run the command as a script."""
    run(command)


if __name__ == "__main__":
    main()
