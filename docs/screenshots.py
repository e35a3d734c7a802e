"""Take the screenshots of the page on reports: ``python docs/screenshots.py`` writes ``report_*.webp`` beside itself.

It needs Chromium, the test kit and the models of the benchmarks. Compiling the models takes some minutes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx

from rammer_testing.browser import Page, find_browser, open_browser
from rammer_testing.models import light_model

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "benchmarks"))

from zoo.sequence import bert_base, lstm_tc  # noqa: E402

#: Maximum bytes of a picture.
MOST_BYTES = 100_000
MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "resnet50": lambda: light_model("resnet50"),
    "lstm_tc": lambda: lstm_tc(0),
    "bert": lambda: bert_base(0),
}
DEVICES = ("cuda", "ipu_sim")
#: By picture: the model, the width of the page, dark colours, and the first and the last section that it shows.
PICTURES = {
    "report_overview.webp": ("resnet50", 1200, False, "head", "graph"),
    "report_schedule.webp": ("resnet50", 1200, False, "schedule", "memory"),
    "report_lstm.webp": ("lstm_tc", 1200, False, "schedule", "memory"),
    "report_bert.webp": ("bert", 800, True, "schedule", "operators"),
    "report_operators.webp": ("bert", 1200, False, "operators", "operators"),
}


def write_page(name: str, folder: Path) -> Path:
    """Write the page of a model and return its path."""
    onnx.save(MODELS[name](), folder / f"{name}.onnx")
    words = [w for d in DEVICES for w in ("--device", d)]
    command = ["report", folder / f"{name}.onnx", *words, "--target", "cuda.sm_90a", "-o", folder / f"{name}.html"]
    subprocess.run([sys.executable, "-m", "rammer.cli.main", *map(str, command)], check=True)
    return folder / f"{name}.html"


def take(page: Page, file: Path, picture: str) -> bytes:
    """Return a picture of some sections of a page."""
    _, width, dark, first, last = PICTURES[picture]
    page.resize(width, 900, dark)
    page.open(file)
    page.value("document.getElementById('bar').style.position = 'static'")
    for table in ("#fusion", "#operators"):  # fewer rows
        page.value(f"[...document.querySelectorAll('{table} tbody tr')].slice(10).forEach(row => row.remove())")
    top, bottom = page.value(
        f"[document.getElementById('{first}').getBoundingClientRect().top + scrollY,"
        f" document.getElementById('{last}').getBoundingClientRect().bottom + scrollY]"
    )
    page.resize(width, int(bottom - top) + 12, dark)
    page.value(f"scrollTo(0, {int(top)})")
    if first == "schedule":
        point_at_a_wait(page)
    return page.shoot("webp")


def point_at_a_wait(page: Page) -> None:
    """Move the pointer to a task in the middle of the schedule."""
    left, top, width = page.value(
        "(b => [b.left, b.top, b.width])(document.querySelector('#schedule canvas').getBoundingClientRect())"
    )
    for x in range(int(left + width * 0.55), int(left + width), 3):
        page.move(x, top + 60)
        if page.value("/waits for[^]*ONNX/.test(document.getElementById('tip').innerText)"):
            return


def main() -> None:
    """Write all pictures, or those of the pages given as MODEL=FILE."""
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    program = find_browser()
    if program is None:
        sys.exit("no browser: install chromium")
    with tempfile.TemporaryDirectory() as folder, open_browser(program) as page:
        files = {name: Path(given[name]) if name in given else write_page(name, Path(folder)) for name in MODELS}
        for picture, (model, *_) in PICTURES.items():
            made = take(page, files[model], picture)
            assert not page.problems and len(made) <= MOST_BYTES, (picture, len(made), page.problems)
            (HERE / picture).write_bytes(made)


if __name__ == "__main__":
    main()
