"""The HTML page of ``rammer report``: its data, its safety, and its behaviour in a headless browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command import Command
from onnx import helper, numpy_helper

from rammer.device.loader import Registry
from rammer.report.html_page import embed_json, render_page
from rammer_testing.browser import NAMES, Page, find_browser, open_browser
from rammer_testing.models import light_model
from rammer_testing.nonempty import some

BROWSER = find_browser()
#: Names that end an element, start one, or are markup in a title.
HOSTILE = [
    "</script><script>document.title = 'taken'</script>",
    "<img src=x onerror=alert(1)>",
    "<!--",
    "&lt;b&gt;",
    "'\"`${1}\u202e\u2028",
]
#: Bytes of a page, and processor seconds that a browser may spend until it is drawn.
MOST_BYTES, MOST_SECONDS = 5_000_000, 1.0


def page_json(path: Path) -> Any:
    """Return the data of a page."""
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def form_of(program: Any, operator: int) -> Any:
    """Return the form of an operator: its kernel, work and times."""
    return program["forms"][program["operators"][operator][1]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    if BROWSER is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    with open_browser(BROWSER) as page:
        yield page


def opened(browser: Page, path: Path, width: int = 1440, dark: bool = False) -> Page:
    """Open a page without errors."""
    browser.problems.clear()
    browser.resize(width, 900, dark)
    browser.open(path)
    assert browser.problems == []
    return browser


@pytest.fixture
def small(rammer: Command, model: Path, tmp_path: Path) -> Path:
    """Write the page of the small model on two devices."""
    path = tmp_path / "page.html"
    done = rammer("report", model, "--device", "toy", "--device", "ipu_sim", "--option", "ipu_sim.tiles=4", "-o", path)
    assert (done.code, done.out.split(" (")[0]) == (0, f"wrote {path}"), done.err
    return path


def test_schedule_of_the_page_has_every_task_and_obeys_the_waits(small: Path) -> None:
    found = page_json(small)
    assert [d["name"] for d in found["devices"]] == ["toy", "ipu_sim"]
    for device in some(found["devices"]):
        (program,) = device["programs"]
        assert program["veus"] == {"toy": 2, "ipu_sim": 4}[device["name"]]
        tasks = [0] * len(program["operators"])
        for first, last, runs in some(program["rows"]):
            free = 0.0
            for operator, _, _, count, _, waits, start in some(runs):
                tasks[operator] += count * (last - first + 1)
                full = [program["counters"][c][3] for c in waits[::2]]
                assert start == pytest.approx(max([free, *full]), abs=0.2)
                free = start + count * form_of(program, operator)["task"]
        assert tasks == [form_of(program, o)["tasks"] for o in range(len(tasks))] and sum(tasks) == program["tasks"]


def test_page_has_the_graph_the_fusion_and_the_memory_plan(small: Path) -> None:
    found = page_json(small)
    assert [n[0] for n in found["graph"]["nodes"]] == ["Conv", "Relu", "Gather"]
    assert found["graph"]["nodes"][0][2] == [-1] and found["graph"]["outputs"][0][2] == 1
    (program,) = found["devices"][1]["programs"]
    assert {n for o in program["operators"] for n in o[3]} == {0, 1, 2}
    (conv,) = (f for f in program["forms"] if f["type"] == "Conv")
    assert conv["seconds"] > 0 and conv["flops"] >= 2 * 4 * 6 * 6 * 27
    assert all(o[4:] == [None, ""] for o in some(program["operators"]))
    assert all(program["operators"][a] and program["operators"][b] for a, b in some(program["edges"]))
    assert {b[1] for b in program["buffers"]} >= {"input", "output"}


def test_measured_times_are_on_the_page(rammer: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    done = rammer("report", model, "--device", "ipu_sim", "--option", "tiles=4", "--measure", "-o", path)
    assert done.code == 0, done.err
    (device,) = page_json(path)["devices"]
    (program,) = device["programs"]
    assert device["measured"] > 0 and all(o[4] > 0 and o[5] == "simulated" for o in some(program["operators"]))
    assert len(program["measured"]) == program["tasks"]


def test_a_missing_device_is_shown_with_the_reason(
    rammer: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMMER_DISABLE", "cuda")
    path = tmp_path / "page.html"
    done = rammer("report", model, "--device", "toy", "--device", "cuda", "-o", path)
    assert done.code == 0
    missing = page_json(path)["devices"][1]
    assert missing["name"] == "cuda" and "RAMMER_DISABLE" in missing["why"] and "programs" not in missing
    assert rammer("report", model, "--device", "cuda", "-o", tmp_path / "none.html").code == 3
    assert not (tmp_path / "none.html").exists()


def test_options_and_targets_apply_to_the_device_that_they_name(rammer: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    words = ("--target", "cuda.sm_90a", "--option", "ipu_sim.tiles=4", "--option", "cuda.executor=graph")
    assert rammer("report", model, "--device", "ipu_sim", *words, "-o", path).code == 0
    (device,) = page_json(path)["devices"]
    assert device["veus"] == 4 and "target" not in device["options"] and "executor" not in device["options"]
    done = rammer("report", model, "--device", "all", *words, "-o", path)
    assert done.code == 0, done.err
    found = {d["name"]: d for d in page_json(path)["devices"]}
    assert found.keys() == set(Registry().devices) and found["ipu_sim"]["veus"] == 4 and "programs" in found["toy"]


# --- safety -------------------------------------------------------------------------------------------


def hostile_model(rng: np.random.Generator) -> onnx.ModelProto:
    """Return a model whose names are all hostile."""
    x, y, w, node, graph = HOSTILE
    ports = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in ((x, [2, 3]), (y, [2, 4]))]
    weights = numpy_helper.from_array(rng.standard_normal((3, 4)).astype(np.float32), w)
    made = helper.make_graph([helper.make_node("MatMul", [x, w], [y], node)], graph, ports[:1], ports[1:], [weights])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def hostile(rammer: Command, tmp_path: Path, rng: np.random.Generator) -> Path:
    """Write the page of a model with hostile names."""
    onnx.save(hostile_model(rng), tmp_path / "m.onnx")
    assert rammer("report", tmp_path / "m.onnx", "--device", "toy", "-o", tmp_path / "page.html").code == 0
    return tmp_path / "page.html"


def test_names_of_a_model_cannot_become_markup(hostile: Path) -> None:
    text = hostile.read_text()
    assert text.count("<script") == 2 and text.count("</script") == 2 and "<img" not in text and "<!--" not in text
    assert page_json(hostile)["graph"]["inputs"][0][0] == HOSTILE[0]


def test_a_browser_shows_hostile_names_as_text(browser: Page, hostile: Path) -> None:
    page = opened(browser, hostile)
    assert page.value("document.title") != "taken" and page.value("document.querySelectorAll('img').length") == 0
    assert HOSTILE[0] in page.value("document.querySelector('header').textContent")


def test_embedded_json_is_data_only() -> None:
    assert json.loads(embed_json({"a": HOSTILE})) == {"a": HOSTILE}
    assert not set("<>&\u2028") & set(embed_json({"a": HOSTILE}))
    with pytest.raises(ValueError, match="JSON"):
        embed_json({"a": float("nan")})


def test_the_policy_refuses_other_scripts(browser: Page, tmp_path: Path) -> None:
    text = render_page("t", {"model": "m", "version": "0", "graph": {}, "passes": [], "devices": []})
    (tmp_path / "page.html").write_text(text.replace("</body>", "<script>document.title = 'taken'</script></body>"))
    browser.problems.clear()
    browser.open(tmp_path / "page.html")
    assert browser.value("document.title") == "t" and any("Content Security Policy" in p for p in browser.problems)


# --- in a browser -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (800, True), (400, False)])
def test_page_draws_without_errors_and_fits_its_width(browser: Page, small: Path, width: int, dark: bool) -> None:
    page = opened(browser, small, width, dark)
    page.value("[...document.querySelectorAll('nav .choice button')].at(-1).click()")  # side by side
    page.shoot()
    assert page.problems == []
    assert page.value("document.documentElement.scrollWidth") <= width
    drawn = "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    assert all(colours > 3 for colours in some(page.value(f"[...document.querySelectorAll('canvas')].map({drawn})")))
    assert page.value("[...document.querySelectorAll('h2')].map(h => h.textContent)") == [
        *("Overview", "Graph", "Passes", "Fusion", "Schedule", "Memory", "Operators", "Compilation")
    ]


def chart_box(page: Page) -> tuple[float, float, float, float]:
    """Scroll to the schedule, and return the left, top, width and height of its canvas."""
    page.value("document.querySelector('#schedule canvas').scrollIntoView({block: 'center'})")
    left, top, width, height = page.value(
        "(b => [b.left, b.top, b.width, b.height])(document.querySelector('#schedule canvas').getBoundingClientRect())"
    )
    return left, top, width, height


def test_pointing_at_a_task_shows_its_waits(browser: Page, small: Path) -> None:
    page = opened(browser, small)
    page.value("document.querySelectorAll('nav .choice button')[1].click()")
    left, top, width, _ = chart_box(page)
    page.move(left + width - 4, top + 60)  # the last task waits
    text = page.value("document.getElementById('tip').innerText")
    assert "waits for" in text and "finished at" in text and "ONNX" in text
    page.move(1, 1)
    assert page.value("document.getElementById('tip').hidden")


def test_keys_and_clicks_zoom_and_select(browser: Page, small: Path) -> None:
    page = opened(browser, small)
    left, top, _, _ = chart_box(page)
    page.value("document.querySelector('#schedule canvas').focus()")
    before = page.shoot()
    page.key("+")
    zoomed = page.shoot()
    page.key("0")
    assert zoomed != before == page.shoot()
    page.key("n")
    assert page.value("document.querySelectorAll('tr.chosen').length") == 1
    assert "tasks" in page.value("document.getElementById('live').textContent")
    page.key("Escape")
    assert page.value("document.querySelectorAll('tr.chosen').length") == 0
    page.click(left + 70, top + 60)
    assert page.value("document.querySelectorAll('tr.chosen').length") == 1


@pytest.mark.slow
def test_page_of_resnet50_is_small_and_opens_quickly(browser: Page, rammer: Command, tmp_path: Path) -> None:
    onnx.save(light_model("resnet50"), tmp_path / "m.onnx")
    path = tmp_path / "page.html"
    done = rammer("report", tmp_path / "m.onnx", "--device", "toy", "--device", "ipu_sim", "-o", path)
    assert done.code == 0 and path.stat().st_size < MOST_BYTES, done.err
    browser.call("Performance.enable", timeDomain="threadTicks")

    def spent() -> float:
        return next(float(m["value"]) for m in browser.call("Performance.getMetrics")["metrics"] if m["name"] == "TaskDuration")

    start = spent()
    opened(browser, path).shoot()
    assert spent() - start < MOST_SECONDS
