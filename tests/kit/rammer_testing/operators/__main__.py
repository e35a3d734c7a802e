"""``python -m rammer_testing.operators``: the search, or one of its cases again."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click

from rammer.commands import gather_options
from rammer_testing.operators import DESCRIBED
from rammer_testing.operators.search import search
from rammer_testing.operators.survey import survey


@dataclass(frozen=True)
class How:
    """The comparison mode, or misuse."""

    fold: bool
    device: str
    misused: bool


@dataclass(frozen=True)
class Shown:
    """Kinds of verdicts, separated by commas, and the number of examples of each."""

    kinds: str
    show: int


@click.command()
@click.argument("ops", nargs=-1)
@click.option("--seed", default=0)
@click.option("--seconds", default=60.0)
@click.option("--fold", is_flag=True, help="Make every operand a constant.")
@click.option("--device", default="", help="Compare a device with the expressions instead.")
@click.option("--kinds", default="wrong,broken,reference,runtime,refused,alone")
@click.option("--show", default=3, help="Examples of each operator and kind.")
@click.option("--misused", is_flag=True, help="Use operators wrongly instead: each must be refused, or mean something.")
@gather_options("shown", Shown, "kinds", "show")
@gather_options("how", How, "fold", "device", "misused")
def main(ops: tuple[str, ...], seed: int, seconds: float, how: How, shown: Shown) -> None:
    """Compare single operators with ONNX Runtime and onnx.reference."""
    if how.misused:
        found_faults = survey(ops or sorted(DESCRIBED), seed, seconds, cases=1_000_000)
        click.echo(f"{found_faults}\nseed {seed}")
        sys.exit(int(bool(found_faults.faults)))
    counts, found = search(ops, seed, seconds, how.fold, how.device)
    total = sum(counts.values())
    click.echo(f"{total} cases of {len({op for op, _ in counts})} operators, seed {seed}")
    for (op, kind), count in sorted(counts.items(), key=lambda i: (i[0][1], i[0][0])):
        if kind not in shown.kinds.split(","):
            continue
        click.echo(f"{kind:9} {op:24} {count}")
        for number, verdict in [f for f in found if (f[1].case.op, f[1].kind) == (op, kind)][: shown.show]:
            click.echo(f"    #{number} {verdict.case}\n        {verdict.text.splitlines()[0] if verdict.text else ''}")


if __name__ == "__main__":
    main()
