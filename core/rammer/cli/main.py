"""The entry point ``rammer``: expected errors print without a traceback. Until ``main`` has isolated the process, only the
standard library and ``rammer.errors`` are imported."""

from __future__ import annotations

import gc
import io
import os
import sys
from typing import Any

from rammer.child_processes import isolate_environment
from rammer.errors import DeviceFailure, RammerError, bound_text, of_system, to_printable


def __getattr__(name: str) -> Any:
    if name == "cli":
        from rammer.cli.group import cli

        return cli
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Run the command line. Exit codes: 0 good, 1 mismatch, 2 bad input, 3 device unavailable, 4 device failure."""
    # Objects of a starting command live to its end. Searching them for cycles took an eighth of a warm start.
    gc.set_threshold(100_000)
    with isolate_environment():
        try:
            _run_command()
        finally:
            gc.freeze()  # the interpreter searches for cycles again when it ends


def _run_command() -> None:
    import click

    from rammer.cli.group import cli

    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as problem:
        shown = io.StringIO()
        problem.show(shown)
        sys.stderr.write(to_printable(bound_text(shown.getvalue())))
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        print("rammer: interrupted; no file was partially written", file=sys.stderr)
        sys.exit(130)
    except RammerError as problem:
        sys.exit(_print_error(problem))
    except MemoryError as problem:
        print(
            f"rammer: error: out of memory on the host: {problem or 'no more can be allocated'}\n"
            "  hint: use a smaller batch or input, or a machine with more memory",
            file=sys.stderr,
        )
        sys.exit(DeviceFailure.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as problem:
        if (told := of_system(problem, "rammer")) is not None:
            sys.exit(_print_error(told))
        _print_traceback()
        said = to_printable(bound_text(str(problem)))
        print(f"rammer: internal error: {said}\n  at: rammer or a plugin; the traceback says where", file=sys.stderr)
        sys.exit(DeviceFailure.exit_code)


def _print_error(problem: RammerError) -> int:
    """Print an expected error and return its exit code."""
    from rammer.debug import TRACEBACKS, debug_level

    print(f"rammer: error: {problem}", file=sys.stderr)
    if debug_level() >= TRACEBACKS:
        _print_traceback()
    return problem.exit_code


def _print_traceback() -> None:
    import traceback

    sys.stderr.write(to_printable(bound_text(traceback.format_exc())))


if __name__ == "__main__":
    main()
