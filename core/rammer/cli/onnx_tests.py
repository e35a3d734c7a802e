"""The command ``rammer onnx-tests``: ONNX's tests on a device, scored."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click

from rammer.cli.common import show_progress
from rammer.cli.distributions import require_kit
from rammer.cli.files import STDOUT, OutputPath, write_text
from rammer.cli.options import device_flag, parse_options
from rammer.errors import Mismatch
from rammer.report.text_table import plain_table


@click.command()
@device_flag("device", "The device to score.", required=True)
@click.option("-k", "pattern", default="", metavar="PATTERN", help="Only tests in whose name this regular expression is found.")
@click.option("--json", "json_file", type=OutputPath(stdout=True), metavar="F", help="Write every score to F; - is stdout.")
@click.option("--processes", type=click.IntRange(1, 4096), metavar="N", help="Default: one for each core.")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="The device's own options, repeatable.")
def command(device: str, pattern: str, json_file: Path | None, processes: int | None, options: tuple[str, ...]) -> None:
    """Score a device by the tests that come with the package onnx; exit code 1 if a test is wrong, fails or is not run.

    A test is passed, passed with operators that the host computed (named), declined (with the reason), wrong, or failed. Declined
    tests and tests computed on the host do not count as passed.

    Example: rammer onnx-tests --device rocm -k conv
    """
    require_kit("rammer onnx-tests")
    import onnx

    from rammer_testing.suite.run import grouped, scores
    from rammer_testing.suite.score import FAILED, UNRUN, WRONG, tally, without_arithmetic

    with show_progress(f"ONNX's tests on {device}") as sink:
        found = scores(device, pattern, parse_options(options), processes or 0, lambda done, of: sink("tests", f"{done} of {of}"))
    counts, quiet = tally(found), str(json_file) == STDOUT
    rows = [[v, str(n), f"{100 * n / len(found):.1f}%"] for v, n in counts.items()]
    click.echo(
        plain_table([*rows, ["all", str(len(found)), ""]], [f"onnx {onnx.__version__} on {device}", "tests", ""]), err=quiet
    )
    right, of = without_arithmetic(found)
    click.echo(f"float32 tests without control flow: {right} of {of} without a host operator of float arithmetic", err=quiet)
    hosted = Counter(h for s in found for h in s.hosted)
    if hosted:
        click.echo("on the host: " + ", ".join(f"{op} {n}" for op, n in hosted.most_common()), err=quiet)
    for why, scored in grouped([s for s in found if s.why]).items():
        click.echo(f"{len(scored):5} {why}  [{', '.join(s.name for s in scored[:3])}]", err=quiet)
    if json_file is not None:
        text = json.dumps({"onnx": onnx.__version__, "device": device, "scores": [s.listed() for s in found]}, indent=1)
        write_text(json_file, text + "\n")
    if counts[WRONG] + counts[FAILED] + counts[UNRUN]:
        raise Mismatch(f"{counts[WRONG]} tests are wrong, {counts[FAILED]} failed, {counts[UNRUN]} were not run")
