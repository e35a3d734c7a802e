"""``python -m rammer_testing.graphs``: run a campaign, or rerun one saved case."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rammer.errors import RammerError
from rammer_testing.graphs.call_forms import FORMS
from rammer_testing.graphs.campaign import CampaignPlan
from rammer_testing.graphs.case import GraphCase
from rammer_testing.graphs.judge import Judge, Setting, registry_of
from rammer_testing.graphs.record import Record
from rammer_testing.graphs.workers import campaign
from rammer_testing.worker_pool import check_tried


def main() -> int:
    """Run the command line; the exit code is 1 if results differ."""
    args = _arguments()
    options = tuple(tuple(o.partition("=")[::2]) for o in args.option)
    setting = Setting(args.device, args.policy, args.layout, args.precision, options, args.form)
    if args.case:
        return _again(args.case, setting, tuple(args.plugin))
    plan = CampaignPlan(
        setting,
        args.seed,
        args.first,
        args.graphs,
        args.seconds,
        args.batch,
        not args.no_voices,
        args.shrink,
        tuple(args.only),
        args.alone,
        args.spoiled,
        tuple(args.plugin),
        args.opset,
    )
    print(f"seed {args.seed}, graphs {args.first} to {args.first + args.graphs - 1} on {setting}", flush=True)
    start = time.monotonic()
    try:
        tally = campaign(plan, args.processes, Record(plan, args.report, args.keep), args.patience)
        seconds = time.monotonic() - start
        print(f"{tally.text()}\n{seconds:.0f} s")
        check_tried(tally.graphs + len(tally.lost), "graph", seconds)
    except RammerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 1 if tally.differences else 0


def _again(path: Path, setting: Setting, plugins: tuple[str, ...]) -> int:
    """Rerun the case of a file, or all cases of a campaign."""
    judge = Judge(registry_of(plugins))
    texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    good = True
    try:
        for text in texts:
            case, extra = GraphCase.parse(text)
            kept = extra.get("setting") if not setting.device else None
            used = Setting(**{**kept, "options": tuple(map(tuple, kept.get("options", ())))}) if kept else setting
            verdict = judge(case, used)
            print(f"{case}\n{used}: {verdict.kind} {verdict.site}\n{verdict.detail}", flush=True)
            good &= verdict.good
    finally:
        judge.outside.close()
    return 0 if good else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rammer_testing.graphs", description=__doc__)
    parser.add_argument("--device", default="", help="NAME or NAME:INDEX; with --case the case's own unless given")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no graph after this long, and end 5 s later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first graph")
    parser.add_argument("--policy", default="wavefront", help="a policy, or * for any")
    parser.add_argument("--layout", default="keep", help="keep, nhwc, auto, or * for any")
    parser.add_argument("--precision", default="float32", help="float32, float16, or * for any")
    parser.add_argument("--form", default="run", help=f"{', '.join(FORMS)}, or * for any")
    parser.add_argument("--batch", type=int, default=1, help="graphs in one model: fewer programs to build")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds after which a graph counts as one that hangs")
    parser.add_argument("--report", type=Path, help="file to which the counts are appended, a JSON line every few seconds")
    parser.add_argument("--no-voices", action="store_true", help="compare with our own evaluation only")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds spent on shrinking a fault")
    parser.add_argument("--keep", type=Path, help="folder for cases.jsonl: faults, shrunk and as drawn")
    parser.add_argument("--only", nargs="*", default=[], help="draw these operators only")
    parser.add_argument("--alone", action="store_true", help="shrink graphs about which one other voice is alone, too")
    parser.add_argument("--spoiled", action="store_true", help="models with one thing wrong, which must be refused")
    parser.add_argument("--opset", type=int, default=0, help="one opset instead of any")
    parser.add_argument("--plugin", action="append", default=[], metavar="MODULE", help="this plugin, not the installed ones")
    parser.add_argument("--case", type=Path, help="run a kept case again, or each line of cases.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
