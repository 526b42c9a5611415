"""The page in headless Chromium, driven over a pipe by the DevTools protocol, which needs no package.

Screenshots are kept in the folder that the variable LINEARGPT_SCREENSHOTS names.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comparison import compare
from comparison.figures import Axis, Figure, Line, Point
from comparison.page import page
from comparison.runs import load_run
from tests import small_run
from tests.comparison.run_folders import read_lines, write_evaluated, write_lines, write_run
from tests.edited import contents

pytestmark = pytest.mark.thorough

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")


class Browser:
    """A Chromium process with one page in it."""

    def __init__(self, chromium: str, profile: Path):
        read_commands, self._commands = os.pipe()
        self._replies, write_replies = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read_commands} 4>&{write_replies}', "bash", chromium, *FLAGS,
             "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            pass_fds=(read_commands, write_replies), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(read_commands)
        os.close(write_replies)
        self._received, self._number, self._session = b"", 0, None
        self.problems: list[str] = []
        """Errors, warnings and uncaught exceptions of the page, and its network requests."""
        self._loaded = False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters} | session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]

    def _receive(self, limit: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + limit
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium has been silent for {limit} s"
            part = os.read(self._replies, 1 << 20)
            assert part, "Chromium ended"
            self._received += part
        line, _, self._received = self._received.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, values: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(values["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(values["args"]))
        elif event == "Log.entryAdded":
            self.problems.append(json.dumps(values["entry"]))
        elif event == "Network.requestWillBeSent":
            address = values["request"]["url"]
            if not address.startswith(("file:", "data:", "blob:")):
                self.problems.append(f"asked for {address}")

    def open(self, path: Path, *, width: int = 1200, height: int = 900, touch: bool = False) -> None:
        """Show a file, in a window of this size; waits until it is drawn."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        self._loaded = False
        self.send("Page.navigate", url=path.as_uri())
        self.await_load()

    def await_load(self) -> None:
        """Waits until a page is drawn that did not exist at the last call of :meth:`open`."""
        while not self._loaded:
            self._receive()
        self._loaded = False

    def value(self, script: str) -> Any:
        """The JSON value of a JavaScript expression."""
        reply = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def box(self, element: str) -> list[float]:
        """Left, top, width and height of an element, a JavaScript expression, which is scrolled to."""
        return self.value(f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center'}}); "
                          "const {left, top, width, height} = e.getBoundingClientRect(); "
                          "return [left, top, width, height]; })()")

    def click(self, element: str, times: int = 1) -> None:
        """Click in the middle of an element, as a mouse does."""
        left, top, width, height = self.box(element)
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=count,
                          x=left + width / 2, y=top + height / 2)

    def drag(self, element: str) -> None:
        """Drag the mouse over the middle of an element."""
        left, top, width, height = self.box(element)
        for kind, part in (("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseMoved", 0.6), ("mouseReleased", 0.6)):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1,
                      x=left + part * width, y=top + part * height)

    def choose(self, name: str, label: str) -> None:
        """Click the button with this label among those of a choice."""
        self.click(f"[...document.querySelectorAll('[data-name={name}] button')]"
                   f".find(each => each.textContent === {json.dumps(label)})")

    def drawn(self, kind: str, figure: str = "loss") -> dict[str, Any]:
        """Plotly's data by runs, comma-separated: x and y."""
        traces = self.value(f"document.getElementById('{figure}').data.filter(t => t.meta.kind === '{kind}')"
                            ".map(t => ({runs: t.meta.runs.join(), x: Array.from(t.x), y: Array.from(t.y)}))")
        return {trace["runs"]: trace for trace in traces}

    def close(self) -> None:
        """End the process."""
        self.send("Browser.close")
        self.process.wait(timeout=30)
        os.close(self._commands)
        os.close(self._replies)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Two seeds of one set-up, and a copy under another mode's name without bits per byte and FLOPs."""
    folder = tmp_path_factory.mktemp("browser")
    recipe, found = small_run.make(folder), {}
    with small_run.settings():
        for seed in (0, 1):
            found[f"chunked-{seed}"] = folder / f"chunked-{seed}"
            assert small_run.run(recipe, "--model.layers", 1, "--train.seed", seed, "--train.steps", 30,
                                 "--train.eval-every", 5, "--run-dir", folder / f"chunked-{seed}") == 0
    copy = found["copy"] = folder / "copy"
    copy.mkdir()
    lines = [{name: value for name, value in line.items() if name not in ("bits_per_byte", "flops")}
             for line in small_run.lines(found["chunked-0"])]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = contents(found["chunked-0"] / "config.json")
    config["model"] |= {"attention": ["softmax"], "context": 64}
    (copy / "config.json").write_text(json.dumps(config))
    positions = [{"first": 1, "last": 1, "loss": 3.0}, {"first": 2, "last": 3, "loss": 2.5}]
    (copy / "evaluation.json").write_text(json.dumps({"evaluations": [
        {"context": 64, "corpus": "times tables", "positions": positions}]}))
    (copy / "samples").mkdir(exist_ok=True)
    (copy / "samples" / "00000030.txt").write_text("7 times 8 is <i>56</i>")
    return found


@pytest.fixture(scope="module")
def report(runs) -> Path:
    """The page of the runs."""
    path = runs["copy"].parent / "report.html"
    points = (Point(1e-3, 2.0, (1.5, 3.0), ("a", "b")), Point(3e-3, 1.0, None, ("c",)))
    lines = (Line("softmax", "softmax", points, best=1), Line("chunked", "chunked", points[:1]))
    figures = [Figure("rates", "Loss against rate", Axis("learning rate", "log"), "val loss", lines,
                      ("attention", "val loss"), (("softmax", "1.0000"),), ("Warning: the edge.",)),
               Figure("none", "Nothing", Axis("x"), "y", (), (), (), ("No run counts.",)),
               Figure("pairs", "Differences", Axis("", "category"), "difference",
                      (Line("chunked", "chunked", (Point("chunked", 0.1, (0.0, 0.2), ("a",)),)),), (), (), zero=True),
               Figure("sizes", "Two sizes", Axis("FLOPs"), "val loss", (Line("softmax", "softmax", (
                   Point(1.0, 2.0, None, ("a",)), Point(2.0, 1.5, (1.0, 2.0), ("b",), joined=False))),), (), ())]
    path.write_text(page(compare([load_run(run) for run in runs.values()]), figures=figures, title="Tiny runs"))
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Browser]:
    """One process for all tests."""
    command = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if command is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    browser = Browser(command, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium, report) -> Iterator[Browser]:
    """The page, just opened; it must have no errors and no network requests."""
    chromium.problems.clear()
    chromium.open(report)
    yield chromium
    assert chromium.problems == []


def keep(browser: Browser, folder: Path, name: str) -> None:
    """A screenshot of the whole page, including the part below the window."""
    folder = Path(os.environ.get("LINEARGPT_SCREENSHOTS") or folder)
    folder.mkdir(parents=True, exist_ok=True)
    size = browser.send("Page.getLayoutMetrics")["cssContentSize"]
    image = browser.send("Page.captureScreenshot", captureBeyondViewport=True, clip=size | {"scale": 1})["data"]
    (folder / f"{name}.png").write_bytes(base64.b64decode(image))


def column(run: Path, name: str, split: str = "val") -> list[float]:
    return [line[name] for line in small_run.lines(run, split)]


def test_axis_buttons_redraw_every_curve(browser, runs, tmp_path):
    keep(browser, tmp_path, "desktop")
    for label, name, title in (("Steps", "step", "steps"), ("Tokens", "tokens", "tokens"),
                               ("Training time", "train_seconds", "training time (seconds)"),
                               ("Wall time", "wall_seconds", "wall time (seconds)")):
        browser.choose("axis", label)
        assert browser.value("document.querySelector('#loss .xtitle').textContent") == title
        for kind, split in (("val", "val"), ("train", "train"), ("raw", "train")):
            assert browser.drawn(kind)["copy"]["x"] == pytest.approx(column(runs["copy"], name, split), rel=1e-6)
        assert browser.drawn("train", "gradient_norm")["copy"]["x"] == pytest.approx(
            column(runs["copy"], name, "train"), rel=1e-6)
    # FLOPs are a multiple of tokens; the copy has no parameter count.
    browser.choose("axis", "FLOPs")
    operations = np.array(browser.drawn("raw")["chunked-1"]["x"]) / column(runs["chunked-1"], "tokens", "train")
    assert operations.min() > 6 * 1000
    np.testing.assert_allclose(operations, operations[0], rtol=1e-6)
    assert "copy" not in browser.drawn("val")
    assert "Without floating-point operations: copy." in browser.value("document.body.innerText")


def test_scales_and_bits_per_byte(browser, runs):
    for name in "xy":
        for label in ("Log", "Linear"):
            browser.choose(name, label)
            assert browser.value(f"document.getElementById('loss')._fullLayout.{name}axis.type") == label.lower()
    browser.choose("axis", "Steps")
    seeds = [runs[f"chunked-{seed}"] for seed in (0, 1)]
    mean = browser.drawn("val")["chunked-0,chunked-1"]
    assert mean["y"] == pytest.approx(np.mean([column(run, "loss") for run in seeds], axis=0), rel=1e-6)
    browser.choose("metric", "Bits per byte")
    assert browser.value("document.querySelector('#loss .ytitle').textContent") == "val bits per byte"
    mean = browser.drawn("val")["chunked-0,chunked-1"]
    assert mean["y"] == pytest.approx(np.mean([column(run, "bits_per_byte") for run in seeds], axis=0), rel=1e-6)
    assert list(browser.drawn("train")) == ["chunked-0,chunked-1"]
    browser.value("void Plotly.Fx.hover('loss', [{curveNumber: document.getElementById('loss').data.findIndex("
                  "t => t.meta.kind === 'train'), pointNumber: 11}])")
    hover = browser.value("document.querySelector('#loss .hoverlayer').textContent")
    assert all(text in hover for text in ("mean of 2 seeds", "bits per byte ", "step 12", "s of training",
                                          "learning rate 0.0"))
    assert "Without bits per byte: copy." in browser.value("document.body.innerText")


def test_the_figures_of_a_study_stand_above_the_curves(browser):
    text = browser.value("document.getElementById('study').innerText")
    for part in ("Loss against rate", "Warning: the edge.", "Nothing", "No run counts.", "Differences", "1.0000"):
        assert part in text
    assert browser.drawn("study", "study-0") == {"a,b,c": {"runs": "a,b,c", "x": [1e-3, 3e-3], "y": [2.0, 1.0]},
                                                 "a,b": {"runs": "a,b", "x": [1e-3], "y": [2.0]}}
    assert browser.drawn("best", "study-0")["c"]["x"] == [3e-3]
    bars = browser.value("(({array, arrayminus}) => [array, arrayminus])(document.getElementById('study-0').data[0]"
                         ".error_y)")
    assert bars == [[1.0, 0], [0.5, 0]]
    assert browser.value("document.getElementById('study-0')._fullLayout.xaxis.type") == "log"
    assert browser.value("[...document.querySelectorAll('#study-0 .xtick text')].map(each => each.textContent)"
                         ) == ["0.001", "0.003"]
    # A point without a mean interrupts a line.
    assert browser.drawn("study", "study-3") == {"a,b": {"runs": "a,b", "x": [1, None, 2], "y": [2, None, 1.5]}}
    assert browser.drawn("study", "study-2")["a"]["x"] == ["chunked"]
    # It belongs to no run that the legend could hide.
    browser.click("document.querySelector('#legend button')", times=2)
    assert "1.0000" in browser.value("document.getElementById('study').innerText")


def test_a_click_in_the_legend_hides_a_run_everywhere(browser):
    def button(text: str) -> str:
        return (f"[...document.querySelectorAll('#legend button')]"
                f".find(each => each.textContent.startsWith({json.dumps(text)}))")

    def table(name: str) -> str:
        """Its text; empty while it is hidden."""
        return browser.value(f"(e => e.offsetParent ? e.innerText : '')(document.getElementById('{name}'))")

    assert list(browser.drawn("band")) == ["chunked-0,chunked-1"]
    browser.click(button("chunked-1"))
    # With one seed left, there is its own curve, and no band.
    assert list(browser.drawn("train")) == ["chunked-0", "copy"]
    assert browser.drawn("band") == {}
    everywhere = ("figures", "times", "throughput", "configs")
    assert all("chunked-1" not in table(name) and "copy" in table(name) for name in everywhere)
    assert list(browser.drawn("train", "learning_rate")) == ["chunked-0", "copy"]
    browser.click(button("softmax"))
    assert list(browser.drawn("train")) == ["chunked-0"]
    assert table("samples") == table("positions") == ""
    browser.click(button("Show all"))
    assert all("chunked-1" in table(name) for name in everywhere)
    assert "7 times 8 is <i>56</i>" in table("samples")
    assert browser.drawn("positions", "positions")["copy"]["y"] == [3.0, 2.5]
    browser.click(button("softmax"), times=2)
    assert list(browser.drawn("val")) == ["copy"]
    browser.click(button("Show all"))
    browser.choose("context", "64")
    assert list(browser.drawn("val")) == ["copy"]
    assert "chunked-0" not in table("figures")


def test_a_seed_that_ended_early_is_a_curve_of_its_own(chromium, tmp_path):
    paths = [write_run(tmp_path / f"seed-{seed}", seed=seed, loss=2 + seed) for seed in range(2)]
    died = write_run(tmp_path / "died", seed=2, steps=40, loss=9.0, planned=100)
    report = tmp_path / "report.html"
    report.write_text(page(compare([load_run(path) for path in [*paths, died]])))
    chromium.problems.clear()
    chromium.open(report)
    chromium.choose("axis", "Steps")
    drawn = chromium.drawn("val")
    assert drawn["seed-0,seed-1"]["x"] == [20, 40, 60, 80, 100]
    assert drawn["seed-0,seed-1"]["y"] == pytest.approx([2.3, 2.1, 1.9, 1.7, 1.5])
    assert drawn["died"]["x"] == [20, 40]
    assert list(chromium.drawn("band")) == ["seed-0,seed-1"]
    assert chromium.problems == []


def test_annealed_points_are_joined_to_the_end_of_the_run(chromium, tmp_path):
    run = write_run(tmp_path / "run")
    *_, last = vals = [line for line in read_lines(run) if line["split"] == "val"]
    points = [line | {"split": "annealed", "begin": line["step"] - 9, "loss": line["loss"] - 1} for line in vals[:2]]
    write_lines(run, [*read_lines(run), *points])
    report = tmp_path / "report.html"
    report.write_text(page(compare([load_run(run)])))
    chromium.problems.clear()
    chromium.open(report)
    chromium.choose("axis", "Steps")
    drawn = chromium.drawn("annealed")["run"]
    assert drawn["x"] == [20, 40, 100]
    assert drawn["y"] == pytest.approx([vals[0]["loss"] - 1, vals[1]["loss"] - 1, last["loss"]], rel=1e-6)
    low, _ = chromium.value("document.getElementById('loss').layout.yaxis.range")
    assert low < min(drawn["y"])
    assert chromium.problems == []


def test_slider_smooths_the_curves_and_not_the_points(browser, runs):
    def slide(percent: int) -> None:
        browser.value(f"(slider => {{ slider.value = {percent}; slider.dispatchEvent(new Event('input')); }})"
                      "(document.querySelector('input[type=range]'))")

    slide(0)
    rough = browser.drawn("train")["copy"]["y"]
    assert rough == pytest.approx(column(runs["copy"], "loss", "train"), rel=1e-6)
    raw, points = browser.drawn("raw"), browser.drawn("val")
    slide(20)
    smooth = browser.drawn("train")["copy"]["y"]
    assert np.abs(np.diff(smooth, 2)).sum() < 0.5 * np.abs(np.diff(rough, 2)).sum()
    assert smooth[15:17] == pytest.approx([np.mean(rough[12:19]), np.mean(rough[13:20])])
    assert (browser.drawn("raw"), browser.drawn("val")) == (raw, points)


# Long timers do not fire until the test ends them.
TIMERS = """{ const set = setTimeout, clear = clearTimeout; let number = -1;
  window.timers = new Map();
  window.setTimeout = (act, wait) => wait < 3000 ? set(act, wait) : (timers.set(--number, {act, wait}), number);
  window.clearTimeout = (number) => timers.delete(number) || clear(number); }"""


def test_a_page_that_is_watched_reloads_itself_and_keeps_the_view(browser, runs, tmp_path):
    path = tmp_path / "watched.html"

    def write(*names: str, reload_seconds: float | None) -> None:
        path.write_text(page(compare([load_run(runs[name]) for name in names]), reload_seconds=reload_seconds))

    def view() -> dict[str, Any]:
        return browser.value(
            "({smoothing: document.querySelector('output').value, scrolled: scrollY > 100, "
            "x: document.getElementById('loss').layout.xaxis.range, "
            "y: document.getElementById('loss').layout.yaxis.range, "
            "chosen: Object.fromEntries([...document.querySelectorAll('.choice')].map("
            "e => [e.dataset.name, e.querySelector('[aria-pressed=true]').innerText]))})")

    hook = browser.send("Page.addScriptToEvaluateOnNewDocument", source=TIMERS)["identifier"]
    try:
        write("chunked-0", "copy", reload_seconds=5.0)
        browser.open(path)
        first = view()
        for name, label in (("axis", "Steps"), ("x", "Log")):
            browser.choose(name, label)
        browser.value("(slider => { slider.value = 11; slider.dispatchEvent(new Event('input')); })"
                      "(document.querySelector('input[type=range]'))")
        browser.click("document.querySelector('#legend button')")
        assert list(browser.drawn("train")) == ["copy"]
        browser.drag("document.querySelector('#loss .nsewdrag')")
        browser.value("new Promise(done => { scrollTo(0, 200); requestAnimationFrame(() => setTimeout(done, 0)); })")
        before = view()
        assert (before["smoothing"], before["scrolled"]) == ("11 %", True)
        assert before["chosen"] == {"context": "All", "axis": "Steps", "x": "Log", "y": "Linear", "metric": "Loss"}
        assert np.ptp(before["y"]) < 0.5 * np.ptp(first["y"])  # zoomed
        write("copy", "chunked-1", "chunked-0", reload_seconds=None)  # the last page: watching has ended
        assert browser.value("[...timers.values()].map(timer => timer.wait)") == [5000]  # one, however often it began
        browser.value("void [...timers.values()][0].act()")
        browser.await_load()
        assert view() == before
        assert list(browser.drawn("train")) == ["copy", "chunked-1"]  # chunked-0 is hidden, the other is new
        browser.click("document.querySelector('#loss .nsewdrag')", times=2)
        assert np.ptp(view()["y"]) > 0.9 * np.ptp(first["y"])
        assert browser.value("timers.size") == 0
        browser.open(path)
        assert view()["chosen"]["axis"] == "Training time"  # opened anew it is as it was made
    finally:
        browser.send("Page.removeScriptToEvaluateOnNewDocument", identifier=hook)


def test_val_loss_is_in_front_and_bands_end_at_zero(browser, tmp_path):
    paths = [write_run(tmp_path / "softmax", form="blockwise"), write_run(tmp_path / "cudnn", form="cudnn"),
             write_run(tmp_path / "seed-1", form="cudnn", seed=1), write_run(tmp_path / "never", "chunked", every=0)]
    write_lines(paths[1], [line | {"gradient_norm": 9.0} for line in read_lines(paths[1])])
    path = tmp_path / "page.html"

    def show(*paths: Path) -> str:
        path.write_text(page(compare([load_run(run) for run in paths])))
        browser.open(path)
        return browser.value("document.querySelector('#loss .ytitle').textContent")

    assert show(*paths[:3]) == "val loss (nats per token)"
    looks = browser.value("document.getElementById('loss').data.map(t => [t.meta.kind, t.mode, t.opacity ?? 1])")
    assert [look for look in looks if look[0] != "raw"] == [
        ["train", "lines", 0.35]] * 2 + [["val", "lines+markers", 1], ["band", "lines", 1], ["val", "lines+markers", 1]]
    assert browser.value("document.getElementById('loss').layout.yaxis.range[1]") > 1.8  # the first val loss is in it
    band = browser.drawn("band", "gradient_norm")["cudnn,seed-1"]["y"]
    assert (min(band), max(band)) == (0, pytest.approx(5 + 8 / 2**0.5))
    assert browser.value("[...document.querySelectorAll('#legend .setup > :first-child')].map(e => e.textContent)") == [
        "softmax (blockwise)", "softmax (cudnn), 2 seeds"]
    assert show(paths[0], paths[3]) == "loss (nats per token)"
    assert show(paths[3]) == "train loss (nats per token)"
    assert browser.value("document.getElementById('loss').data.map(t => t.opacity ?? 1)") == [0.2, 1]
    keep(browser, tmp_path, "train-loss")


def test_a_run_that_was_only_evaluated_is_drawn_by_position_alone(browser, runs, tmp_path):
    evaluated = load_run(write_evaluated(tmp_path / "published", "linear"))
    path = tmp_path / "page.html"

    def drawn() -> list[bool]:
        return browser.value("['controls', 'loss', 'throughput', 'legend', 'positions', 'figures'].map("
                             "id => Boolean(document.getElementById(id).offsetParent))")

    path.write_text(page(compare([load_run(runs["copy"]), evaluated])))
    browser.open(path, width=390, height=844, touch=True)
    keep(browser, tmp_path, "evaluated")
    assert drawn() == [True] * 6
    assert list(browser.drawn("positions", "positions")) == ["copy", "published"]
    assert list(browser.drawn("val")) == ["copy"]
    assert browser.value("document.getElementById('reading').innerText").endswith("show only that run.")
    path.write_text(page(compare([evaluated])))
    browser.open(path, width=390, height=844, touch=True)
    keep(browser, tmp_path, "evaluated-alone")
    assert drawn() == [False, False, False, True, True, True]
    assert browser.value("document.documentElement.scrollWidth") == 390


def test_on_a_phone_and_on_paper(browser, report, tmp_path):
    browser.open(report, width=390, height=844, touch=True)
    keep(browser, tmp_path, "phone")
    assert browser.value("document.documentElement.scrollWidth") == 390
    browser.choose("axis", "FLOPs")  # the last button of the row is within reach
    assert browser.value("document.querySelector('#loss .xtitle').textContent") == "floating-point operations"
    assert browser.value("document.querySelector('#loss .main-svg').getBoundingClientRect().right") <= 390
    browser.open(report)
    browser.value("addEventListener('beforeprint', () => { printed = document.querySelector('#loss .main-svg')"
                  ".getBoundingClientRect().width; })")
    assert base64.b64decode(browser.send("Page.printToPDF")["data"]).startswith(b"%PDF")
    assert browser.value("printed") == 680  # fits between the margins of A4 and of letter paper
    assert browser.value("document.querySelector('#loss .main-svg').getBoundingClientRect().width") > 1000
    browser.send("Emulation.setEmulatedMedia", media="print")
    shown = browser.value("['controls', 'loss', 'figures', 'samples'].map(id => "
                          "document.getElementById(id).getBoundingClientRect().height > 0)")
    browser.send("Emulation.setEmulatedMedia", media="")
    assert shown == [False, True, True, True]
