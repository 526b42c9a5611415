"""compare.py as a command."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import compare
from comparison.figures import loss_against, write_figures
from comparison.runs import load_run
from tests.comparison.run_folders import read_lines, write_lines, write_run
from tests.edited import edited

ROOT = Path(compare.__file__).parent


@pytest.fixture
def two(tmp_path):
    return [write_run(tmp_path / "softmax", form="blockwise"),
            write_run(tmp_path / "chunked", "chunked", steps=400, seconds=0.25, loss=2.1, slope=0.004)]


def reloads(page):
    """Whether a page, where there is one, reloads itself."""
    return page.exists() and f'"reload_seconds":{compare.RELOAD_SECONDS}' in page.read_text()


def figures(path):
    """The rows of a JSON file that compare.py wrote."""
    return {row["run"]: row for row in json.loads(path.read_text())["rows"]}


def test_command_as_a_user_runs_it(two, tmp_path):
    out = tmp_path / "pages"
    with (two[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "tokens": 64')  # half-written: the run goes on
    done = subprocess.run([sys.executable, ROOT / "compare.py", *two, "--out", out / "report.html", "--png",
                           out / "report.png", "--svg", out / "report.svg", "--csv", out / "report.csv", "--json",
                           out / "report.json", "--title", "A title & more", "--note", "Mine."],
                          cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert all(cell in done.stdout for cell in ("softmax", "1.0000", "After 100 steps", "report.html"))
    page = (out / "report.html").read_text()
    assert "A title &amp; more" in page
    assert "Mine." in page
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "report.svg").read_text()
    assert (out / "report.csv").read_text().count("\n") == 3
    assert list(figures(out / "report.json")) == ["softmax", "chunked"]


def test_what_is_wrong_with_lines_is_reported_and_counted(two, tmp_path, capsys):
    lines = read_lines(two[0])
    write_lines(two[0], [line | {"loss": None} if line["step"] > 90 else line for line in lines] + lines[5:10])
    never = write_run(tmp_path / "never", every=0)
    assert compare.main([*map(str, (*two, never)), "--out", str(tmp_path / "page.html"), "--json",
                         str(tmp_path / "page.json")]) == 0
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "softmax: the train loss is not finite from step 91 on (10 of 100 points).",
        "softmax: 5 train line(s) repeat the step of a later line, which is used.",
        "softmax: the steps of the train lines decrease 1 time(s); the lines are sorted.",
        "softmax: the val loss is not finite from step 100 on (1 of 5 points).",
        "never is not compared: it has no val loss. The plot shows its train loss."]
    found = figures(tmp_path / "page.json")
    assert (found["softmax"]["val_loss"], found["softmax"]["best_val_loss"]) == (None, 1.2)
    assert found["never"]["loss_at_shortest"] is None


@pytest.mark.parametrize("break_it", [
    lambda run: (run / "config.json").write_text('{"model": {"atten'),
    lambda run: (run / "config.json").write_text("{}"),
    lambda run: (run / "config.json").write_text(
        (run / "config.json").read_text().replace('"format": 2', '"format": 3')),
    lambda run: (run / "environment.json").write_text("\0\0\0"),
    lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 2.0}\n'),
    lambda run: (run / "metrics.jsonl").write_text(""),
])
def test_a_run_that_cannot_be_drawn_is_left_out_and_named(two, tmp_path, capsys, break_it):
    break_it(two[0])
    assert compare.main([*map(str, two), "--out", str(tmp_path / "page.html"),
                         "--json", str(tmp_path / "page.json")]) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith(f"left out: {two[0]}/")
    assert list(figures(tmp_path / "page.json")) == ["chunked"]
    assert compare.main([str(two[0]), "--out", str(tmp_path / "none.html")]) == 1
    assert not (tmp_path / "none.html").exists()


STUDY = '''"""Which rate does each attention want?

More of it.
"""

from comparison.figures import loss_against


def get_runs(quick):
    return []


def figures(runs):
    return [loss_against(runs, "optimizer.learning_rate")]
'''


@pytest.fixture
def study(tmp_path):
    """Runs of two rates and a study of them, of which one run has logged nothing and one is not begun."""
    (tmp_path / "study.py").write_text(STUDY)
    out = tmp_path / "out"
    for rate, loss in ((1e-3, 2.0), (3e-3, 2.5)):
        write_run(out / f"softmax-{rate}", learning_rate=rate, loss=loss)
    (write_run(out / "failed", "linear") / "metrics.jsonl").unlink()
    names = [*sorted(path.name for path in out.iterdir()), "later"]
    (out / "study.json").write_text(json.dumps({
        "format": 1, "study": str(tmp_path / "study.py"), "quick": False,
        "runs": [{"name": name, "hash": "0"} for name in names]}))
    write_run(out / "not-of-the-study", "chunked")
    return out


def test_a_study_is_shown_with_its_figures(study, tmp_path, capsys):
    out = tmp_path / "page.html"
    file = ["--study-file", str(tmp_path / "study.py")]
    assert compare.main(["--study", str(study), *file, "--out", str(out), "--json", str(tmp_path / "page.json")]) == 0
    printed = capsys.readouterr()
    for text in ("Final val loss against learning rate", "Warning: the best learning rate of softmax, 0.001, is the",
                 "Not drawn, without valid runs: linear."):
        assert text in printed.out
    assert "failed has no metrics" in printed.err
    assert "not started: later" in printed.err
    text = out.read_text()
    assert "<h1>Which rate does each attention want?</h1>" in text
    assert '"title":"Final val loss against learning rate"' in text
    assert list(figures(tmp_path / "page.json")) == ["softmax-0.001", "softmax-0.003"]
    figure, = json.loads((tmp_path / "page.json").read_text())["figures"]
    assert [point["mean"] for point in figure["lines"][0]["points"]] == pytest.approx([1.0, 1.5])
    # Without a study, nothing of it.
    assert compare.main([str(study / "softmax-0.001"), "--out", str(out), "--json", str(tmp_path / "page.json")]) == 0
    assert '"study":[]' in out.read_text()
    assert "figures" not in json.loads((tmp_path / "page.json").read_text())


def test_what_is_no_study_is_refused(study, tmp_path, capsys):
    def refused(code, *arguments):
        out = tmp_path / "none.html"
        assert compare.main([*map(str, arguments), "--out", str(out)]) == code
        printed = capsys.readouterr().err
        assert len(printed.splitlines()) == 1
        assert not out.exists()
        return printed

    assert "are mutually exclusive" in refused(2, study / "softmax-0.001", "--study", study)
    assert "not the folder of a study" in refused(2, "--study", tmp_path)
    assert "none: no such folder" in refused(2, "--study", tmp_path / "none")
    (tmp_path / "study.py").write_text(STUDY.replace("optimizer.learning_rate", "optimizer.learning_rte"))
    assert "no run has a field optimizer.learning_rte" in refused(2, "--study", study, "--study-file",
                                                                  tmp_path / "study.py")
    assert "study.py requires --study" in refused(2, study / "softmax-0.001", "--study-file", tmp_path / "study.py")


@pytest.mark.parametrize("named", ["study.py", "{root}/studies/../out/study.py", "studies/no.py"])
def test_the_program_that_a_folder_names_is_not_run(named, study, tmp_path, capsys, monkeypatch):
    """A study of someone else: its figures are those that sweep.py wrote."""
    write_figures([loss_against([load_run(study / f"softmax-{rate}") for rate in (0.001, 0.003)],
                                "optimizer.learning_rate", title="Theirs")], study / "figures")
    ran = tmp_path / "ran"
    for file in (tmp_path / "study.py", study / "study.py", study / "studies" / "no.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(STUDY + f"\nopen({str(ran)!r}, 'w')\n")
    named = named.format(root=ROOT)
    with edited(study / "study.json") as record:
        record["study"] = named
    monkeypatch.chdir(study)
    out = tmp_path / "page.html"
    assert compare.main(["--study", str(study), "--out", str(out)]) == 0
    assert not ran.exists()
    printed = capsys.readouterr()
    assert f"note: the figures are those in {study / 'figures'}: {Path(named)} is not one of" in printed.err
    assert "Theirs" in printed.out
    assert "1.5000" in printed.out
    assert '"title":"Theirs"' in out.read_text()
    (study / "figures" / "figures.json").write_text('{"figures": [{"name": 5}]}')
    assert compare.main(["--study", str(study), "--out", str(out)]) == 0
    assert "figures.json is damaged: figures[0].name is 5" in capsys.readouterr().err
    shutil.rmtree(study / "figures")
    assert compare.main(["--study", str(study), "--out", str(out)]) == 0
    assert '"study":[]' in out.read_text()


def test_a_study_of_lineargpt_is_run_wherever_the_command_is(study, tmp_path, capsys, monkeypatch):
    with edited(study / "study.json") as record:
        record["study"] = "studies/learning_rate.py"
    monkeypatch.chdir(tmp_path)
    assert compare.main(["--study", str(study), "--out", str(tmp_path / "page.html")]) == 0
    assert "Final val loss against learning rate" in capsys.readouterr().out


@pytest.mark.fast
def test_usage_errors_stop_before_anything_is_written(two, tmp_path, capsys):
    out = tmp_path / "page.html"
    out.write_text("old")
    (tmp_path / "folder").mkdir()
    for arguments, message in [
        ([], "name one or more run folders"),
        ([tmp_path / "missing", *two], "missing: no such folder"),
        ([tmp_path / "folder", out], "folder: not a run, it has no config.json"),
        ([two[0], two[0]], "given twice"),
        ([two[0], "--png", "picture.gif"], "expected a name ending in .png or .svg"),
        ([two[0], "--svg", "picture.png"], "expected a name ending in .svg"),
        ([two[0], "--json", out], "given for two outputs"),
        ([two[0], "--titel", "x"], "unknown flag --titel; perhaps you meant --title"),
    ]:
        assert compare.main([*map(str, arguments), "--out", str(out)]) == 2
        output = capsys.readouterr()
        assert message in output.err
        assert len(output.err.splitlines()) == 1
        assert output.out == ""
    assert out.read_text() == "old"


def test_unwritable_page_ends_in_one_line(two, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "page.html", two[0]):
        assert compare.main([*map(str, two), "--out", str(out)]) == 1
        output = capsys.readouterr()
        assert output.err.startswith(f"compare.py: {out}: cannot be written")
        assert len(output.err.splitlines()) == 1
        assert "1.0000" in output.out  # the table is not lost
    assert sorted(os.listdir(tmp_path)) == ["chunked", "file", "softmax"]


def test_watch_draws_what_has_changed_until_it_is_interrupted(tmp_path, capsys):
    out, pages = tmp_path / "page.html", []
    options = compare.Options((tmp_path / "runs" / "*", tmp_path / "never"), out=out, json=tmp_path / "page.json",
                              watch=True)

    def begin():
        write_run(tmp_path / "runs" / "first", every=0, steps=1)

    def grow():
        write_lines(tmp_path / "runs" / "first", read_lines(write_run(tmp_path / "longer", steps=7)))

    def another():
        write_run(tmp_path / "runs" / "second", "chunked")

    def stop():
        raise KeyboardInterrupt

    events = [lambda: None, begin, lambda: None, grow, another, stop]

    def wait(_):
        pages.append(out.stat().st_mtime_ns if out.exists() else None)
        assert out.exists() == reloads(out)
        events.pop(0)()

    assert compare.watch(options, wait) == 0
    assert out.exists()
    assert not reloads(out)
    # Nothing to draw twice; then a run, the same run unchanged, the run grown, another run.
    assert pages[:2] == [None, None]
    assert pages[2] == pages[3] < pages[4] < pages[5]
    assert {name: row["steps"] for name, row in figures(tmp_path / "page.json").items()} == {"first": 7, "second": 100}
    output = capsys.readouterr()
    assert "2 run(s), up to step 100" in output.out
    assert "waiting: no runs yet" in output.err
    assert "skipped: " in output.err
    assert output.err.splitlines()[-1] == "stopped watching"


def test_watching_that_ends_leaves_a_page_that_does_not_reload(two, tmp_path, capsys):
    out, before = tmp_path / "page.html", signal.getsignal(signal.SIGTERM)

    def terminate(_):
        assert reloads(out)
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        compare.watch(compare.Options(tuple(two), out=out, watch=True), terminate)
    assert ended.value.code == 143
    assert not reloads(out)
    assert capsys.readouterr().err.splitlines()[-1] == "stopped watching"
    assert signal.getsignal(signal.SIGTERM) is before
    out.unlink()
    with pytest.raises(OSError, match="cannot be written"):  # a folder where the file should go
        compare.watch(compare.Options(tuple(two), out=out, csv=two[0], watch=True))
    assert out.exists()
    assert not reloads(out)


def test_watching_goes_on_after_a_full_disk(two, tmp_path, capsys, monkeypatch):
    out, pages = tmp_path / "page.html", []
    whole, full = Path.write_bytes, []

    def write_bytes(path, contents):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return whole(path, contents)

    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    # Full from the start, still full; written; full with the next change of the runs, and written without another.
    events = [lambda: None, full.clear, lambda: (full.append(1), write_run(tmp_path / "third")),
              lambda: None, full.clear, stop]

    def wait(_):
        pages.append(out.read_text().count("third") > 0 if out.exists() else None)
        events.pop(0)()

    full.append(1)
    assert compare.watch(compare.Options((tmp_path / "*",), out=out, watch=True), wait) == 0
    assert pages == [None, None, False, False, False, True]
    assert not reloads(out)
    printed = capsys.readouterr().err.splitlines()
    assert sum(f"{out}: cannot be written (No space left on device)" in line for line in printed) == 2
    assert printed[-1] == "stopped watching"


def test_it_starts_without_jax():
    """Which takes seconds to import, and draws nothing."""
    code = "import compare, sys; print('jax' in sys.modules, 'flax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False False\n"


def test_no_name_reaches_the_terminal_as_a_command(tmp_path, capsys):
    assert compare.main([str(write_run(tmp_path / "<b>[red]")), "--out", str(tmp_path / "page.html")]) == 0
    assert "<b>[red]" in capsys.readouterr().out  # nor is it markup
    path = write_run(tmp_path / "\x1b]0;owned\x07red\x1b[31m\n\r\x9b2J")
    broken = write_run(tmp_path / "bro\x1b[2Jken")
    (broken / "config.json").write_text("{")
    assert compare.main([str(path), str(broken), "--out", str(tmp_path / "page.html"), "--json",
                         str(tmp_path / "page.json"), "--csv", str(tmp_path / "table.csv")]) == 1
    output = capsys.readouterr()
    assert not set(output.out + output.err) & {"\x1b", "\x07", "\r", "\x9b"}
    assert "red" in output.out
    assert f"left out: {tmp_path}/broken/config.json is damaged" in output.err
    assert list(figures(tmp_path / "page.json")) == ["red "]
    unencoded = write_run(tmp_path / os.fsdecode(b"caf\xe9"))
    assert compare.main([str(unencoded), "--out", str(tmp_path / "page.html"), "--csv",
                         str(tmp_path / "table.csv")]) == 0
    assert "caf\N{REPLACEMENT CHARACTER}" in (tmp_path / "table.csv").read_text()
