"""The command ``rammer``: one file a command; expected errors print without a traceback."""

from __future__ import annotations

import os
import sys
import traceback

import click

import rammer
from rammer.cli import lazy
from rammer.compiled.debug import TRACEBACKS, level
from rammer.errors import DeviceFailure, RammerError, of_system


@click.group(cls=lazy.LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(rammer.__version__, prog_name="rammer")
def cli() -> None:
    """Compile ONNX models into static tables of tasks and run them on any device with a plugin.

    Example: rammer run model.onnx --device rocm
    """


def main() -> None:
    """Entry point. Exit codes: 0 good, 1 mismatch, 2 bad input, 3 device unavailable, 4 device failure."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as problem:
        problem.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        print("rammer: interrupted; nothing was written by halves", file=sys.stderr)
        sys.exit(130)
    except RammerError as problem:
        sys.exit(_tell(problem))
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
            sys.exit(_tell(told))
        traceback.print_exc()
        print(f"rammer: internal error: {problem}\n  at: rammer or a plugin; the traceback says where", file=sys.stderr)
        sys.exit(DeviceFailure.exit_code)


def _tell(problem: RammerError) -> int:
    """Print an expected error; its exit code."""
    print(f"rammer: error: {problem}", file=sys.stderr)
    if level() >= TRACEBACKS:
        traceback.print_exc()
    return problem.exit_code


if __name__ == "__main__":
    main()
