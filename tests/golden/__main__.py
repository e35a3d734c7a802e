"""Freeze the compiler's output, or compare it with the frozen files. No GPU is needed.

python tests/golden                             compare everything; exit code 1 if anything differs
python tests/golden kernels models --model nerf_mlp --workers 1
python tests/golden --bless                     rewrite all files, or the named parts of them
python tests/golden --dump before               write the texts themselves, too: diff -r before after
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click
from golden_file import report
from golden_models import DEVICES, MODELS, ZOO, jobs
from golden_run import PARTS, Made, compiled, cubins, incomparable, texts


@click.command(help=__doc__)
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option("--bless", is_flag=True, help="Freeze what is made now.")
@click.option("--model", "models", multiple=True, type=click.Choice(tuple(ZOO)), help="These models; else all that are frozen.")
@click.option("--device", "devices", multiple=True, type=click.Choice(tuple(DEVICES)), help="These devices; else all.")
@click.option("--dump", type=click.Path(path_type=Path), help="Where to write texts, programs and all candidates.")
@click.option("--workers", default=os.cpu_count() or 1, show_default="cores", type=click.IntRange(1), help="Side by side.")
def main(
    parts: tuple[str, ...], bless: bool, models: tuple[str, ...], devices: tuple[str, ...], dump: Path | None, workers: int
) -> None:
    """Make the parts, then freeze or compare them."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["RAMMER_CACHE"] = cache  # an empty cache: earlier runs cannot affect the result
        made, wanted = list[Made](), parts or PARTS
        made += [texts(dump)] if "kernels" in wanted else []
        if "cubins" in wanted:
            why = "" if bless else incomparable()
            click.echo(why or "", nl=bool(why))
            made += [] if why else [cubins(workers)]
        if "models" in wanted:
            chosen = [j for j in jobs(models or MODELS) if j.device in (devices or DEVICES)]
            made += compiled(chosen, workers, dump)
    found = [difference for m in made for difference in m.compare()] if not bless else []
    for m in made if bless else ():
        m.bless()
    click.echo(f"frozen: {', '.join(m.file for m in made)}" if bless else report(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
