"""Draw the pictures of the documents: ``python docs/draw.py`` writes ``staircase.svg`` and ``factors.svg`` next to this file.

The tests draw them again and compare.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
SUMMARY = HERE.parent / "benchmarks" / "results" / "h200_summary.md"

#: What a model is on each step, what brings it there, and what can be seen of it (`rammer inspect --stage`).
STEPS = (
    ("model.onnx", "a file", ""),
    ("Graph", "read, typed, folded, rewritten", "graph"),
    ("ComputeGraph", "every operator as tensor expressions", "compute"),
    ("StoragePlan", "views instead of copies", ""),
    ("TileGraph", "which expressions meet, at which memory layer", "tile"),
    ("RKernels", "tiles and texts by the device; predicted or measured", "kernels, source"),
    ("Schedule", "a policy: which task on which unit, in which order", "schedule, trace"),
    ("RProgram", "a static table with waits and memory, verified", "program"),
    ("device plugin", "loads the table and runs it", ""),
)

STEP_WIDTH, STEP_HEIGHT, SHIFT, DROP, MARGIN = 380, 40, 42, 50, 14
#: Background, lines and letters; one colour for the core's steps, one for what is outside it, one for peers.
PAPER, INK, CORE, OUTSIDE, QUIET = "#ffffff", "#1f2933", "#dbe9f6", "#f6e7d0", "#6b7785"


def svg(width: int, height: int, *elements: str) -> str:
    """A picture on a background of its own, so that it can be read on dark pages, too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    style = "<style>text { font-family: Helvetica, Arial, sans-serif; }</style>"
    return "\n".join((head, style, box(0, 0, width, height, PAPER), *elements, "</svg>")) + "\n"


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """A filled rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'


def words(x: float, y: float, text: str, size: int = 12, anchor: str = "start", weight: str = "normal", fill: str = INK) -> str:
    """One line of text; (x, y) is on its base line."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{fill}">{escape(text)}</text>'
    )


def staircase() -> str:
    """The languages that a model goes through, from the file to the device."""
    drawn = []
    for number, (name, what, stage) in enumerate(STEPS):
        x, y = MARGIN + number * SHIFT, MARGIN + number * DROP
        drawn.append(box(x, y, STEP_WIDTH, STEP_HEIGHT, OUTSIDE if number in (0, len(STEPS) - 1) else CORE))
        drawn.append(words(x + 10, y + 17, name, 14, weight="bold"))
        drawn.append(words(x + 10, y + 33, what))
        if stage:
            drawn.append(words(x + STEP_WIDTH - 10, y + 17, stage, 11, "end", fill=QUIET))
        if number + 1 < len(STEPS):
            drawn.append(f'<path d="M {x + 20} {y + STEP_HEIGHT} v {DROP - STEP_HEIGHT + 20} h 18" fill="none" stroke="{INK}"/>')
            drawn.append(f'<path d="M {x + 36} {y + DROP + 16} l 6 4 l -6 4 z" fill="{INK}"/>')
    width = 2 * MARGIN + (len(STEPS) - 1) * SHIFT + STEP_WIDTH
    height = 2 * MARGIN + (len(STEPS) - 1) * DROP + STEP_HEIGHT
    drawn.append(words(MARGIN, height - MARGIN, "grey: rammer inspect MODEL --stage STAGE", 11, fill=QUIET))
    return svg(width, height, *drawn)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of the first table of a result file, by the table's heads."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def factors() -> str:
    """How many times faster than the best peer each model is, as bars."""
    rows = rows_of(SUMMARY)
    left, line, unit, top = 180, 22, 40, 40
    title = "One H200, batch 1 unless the name says otherwise: latency of the best peer over rammer's"
    drawn = [words(MARGIN, 20, title, 13, weight="bold")]
    for number, row in enumerate(rows):
        y = top + number * line
        factor = float(row["faster by"].rstrip("x"))
        drawn.append(words(left - 8, y + 13, f"{row['model']}, {row['precision']}", anchor="end"))
        drawn.append(box(left, y, factor * unit, line - 5, CORE))
        drawn.append(words(left + factor * unit + 6, y + 13, f"{factor:.2f} ({row['which']})", 11))
    end = top + len(rows) * line
    drawn.append(f'<path d="M {left + unit} {top - 6} V {end}" stroke="{QUIET}" stroke-dasharray="3 3"/>')
    widest = max(float(row["faster by"].rstrip("x")) for row in rows)
    return svg(int(left + widest * unit + 160), end + MARGIN, *drawn)


PICTURES = {"staircase.svg": staircase, "factors.svg": factors}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())
