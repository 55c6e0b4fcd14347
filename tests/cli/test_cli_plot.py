"""`cukern bench --plot`, `plot`, `compare` and `report`: pictures of measurements, and what is refused."""

import json
import re
import shutil
import subprocess
import time
from dataclasses import replace

import pytest
from helpers import TREE
from test_cli import call, refused

from cukern.bench import charts, environment, record
from cukern.bench import plot as pictures
from cukern.cli import report

FACTS = {"dirty": False, "driver": "1", "torch": "2.11", "cupy": "14", "nvrtc": "13"}


def line(
    op="softmax", version="v1", pass_="fwd", shape=(8, 64), provider="cukern", us=2.0, commit="aaaa1111",
    gpu="NVIDIA A", day=1,
):  # fmt: skip
    bytes_ = 8 * shape[0] * shape[1]
    measured = {
        "op": op,
        "version": version,
        "pass": pass_,
        "shape": shape,
        "dtype": "float32",
        "provider": provider,
        "median_us": us,
    }
    derived = {
        "iqr_us": 0.1,
        "bytes": bytes_,
        "flops": 10,
        "tbps": bytes_ / us * 1e-6,
        "tflops": 1e-5 / us,
        "of_limit": 0.5,
        "error": None,
    }
    return {
        **measured,
        **derived,
        "commit": commit,
        "gpu": gpu,
        "date": f"2026-01-{day:02}T00:00:00+00:00",
        **FACTS,
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the results of two GPUs: three sizes, two commits, a peer and a copy."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for day, commit, factor in ((1, "aaaa1111", 1.0), (2, "bbbb2222", 0.5)):
        for pass_ in ("fwd", "bwd"):
            for columns in (64, 128, 256):
                options = {"pass_": pass_, "shape": (8, columns), "commit": commit, "day": day}
                rows += [
                    line(version="v1", us=4 * factor, **options),
                    line(version="v2", us=2 * factor, **options),
                ]
                rows += [line(version="", provider=p, us=3.0, **options) for p in ("torch", "copy")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({**r, "gpu": "NVIDIA B", "median_us": 3 * r["median_us"]}) + "\n" for r in rows)
    )
    return tmp_path


def texts(figure):
    return [
        t.get_text()
        for axes in figure.axes
        for t in (axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label)
    ]


def test_lines_over_the_size_that_differs(folder):
    rows = [one.row for one in record.newest(record.read(folder / "a.jsonl"))]
    figure = pictures.drawn(rows, "NVIDIA A")
    assert (
        "softmax fwd float32, ROWS 8, NVIDIA A" in texts(figure)
        and "COLUMNS" in texts(figure)
        and "TB/s" in texts(figure)
    )
    curves = {
        curve.get_label(): (list(curve.get_xdata()), list(curve.get_ydata()))
        for curve in figure.axes[0].get_lines()
    }
    assert set(curves) == {"cukern v1", "cukern v2", "torch", "limit: a copy of the same bytes"}
    xs, ys = curves["cukern v2"]
    assert xs == [64, 128, 256] and ys == pytest.approx([8 * 8 * n / 1e6 for n in (64, 128, 256)]), (
        "the newest commit: 1 us"
    )
    few = pictures.drawn([r for r in rows if r.shape == (8, 64)], "NVIDIA A")
    assert "softmax fwd 8x64 float32 on NVIDIA A" in texts(few) and len(few.axes[0].patches) == 4
    pictures.save(figure, folder / "x.svg")
    pictures.save(few, folder / "y.svg")


def test_lines_of_shapes_that_differ_in_one_size(folder):
    """Of shapes that differ in several sizes, those are drawn that have only one size on the axis. Legends
    begin with cukern."""
    shapes = [(8, 64), (8, 128), (8, 256), (16, 64), (16, 128), (32, 32)]
    rows = [
        line(provider=p, version=v, shape=s)
        for s in shapes
        for p, v in (("copy", ""), ("torch", ""), ("cukern", "v10"), ("cukern", "v2"))
    ]
    (folder / "c.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    figure = pictures.drawn([one.row for one in record.read(folder / "c.jsonl")], "X")
    assert "softmax fwd float32, ROWS 8, X" in texts(figure)
    curves = figure.axes[0].get_lines()
    assert [c.get_label() for c in curves] == [
        "cukern v2",
        "cukern v10",
        "torch",
        "limit: a copy of the same bytes",
    ]
    assert all(list(c.get_xdata()) == [64, 128, 256] for c in curves)
    pictures.save(figure, folder / "x.svg")
    assert pictures._ticks([1, 2, 2.01, 1024]) == [1, 2, 1024]


def test_points_of_shapes_that_differ_in_several_sizes(folder):
    """They are not connected. An op that is measured next to a copy is drawn in TB/s, however many operations
    it does."""
    shapes, providers = ((1, 8), (2, 64), (3, 512)), (("copy", ""), ("cukern", "v2"))
    rows = [
        {**line(provider=p, version=v, shape=s), "flops": 10**6, "tflops": 1.0}
        for s in shapes
        for p, v in providers
    ]
    (folder / "c.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    figure = pictures.drawn([one.row for one in record.read(folder / "c.jsonl")], "X")
    own, copy = figure.axes[0].get_lines()
    assert "TB/s" in texts(figure) and "MiB that a call reads and writes" in texts(figure)
    assert (own.get_linestyle(), copy.get_linestyle()) == ("None", "--") and own.get_label() == "cukern v2"
    pictures.save(figure, folder / "x.svg")


def test_each_op_of_a_roofline_has_its_own_color(folder):
    rows = [replace(one.row, op=f"op{i}") for one in record.read(folder / "a.jsonl")[:1] for i in range(30)]
    copy = replace(rows[0], provider="copy", version="")
    points, roof = charts.roofline([*rows, copy])
    assert len({report.color(i) for i in range(len(points))}) == len(points) == 30
    peak = max(y for ((_, y),) in points.values())
    assert len(roof) == 3 and all(y == min(copy.tbps * x, peak) for x, y in roof)


def test_only_the_newest_of_many_versions_is_a_line(folder):
    text = "".join(
        json.dumps(line(version=f"v{v}", shape=(8, n), us=1.0)) + "\n"
        for v in range(1, 12)
        for n in (1, 2, 3)
    )
    (folder / "c.jsonl").write_text(text)
    figure = pictures.drawn([one.row for one in record.read(folder / "c.jsonl")], "X")
    assert [curve.get_label() for curve in figure.axes[0].get_lines()] == ["cukern v11"]
    pictures.save(figure, folder / "x.svg")


def test_plot_of_recorded_results(folder):
    call("plot", "softmax", "--gpu", "b", "--out", "x.svg")
    assert "<svg" in (folder / "x.svg").read_text()
    call("plot", "softmax", 8, "*", "--from", "a.jsonl", "--history", "--dtype", "f", "--pass", "fwd")
    assert (folder / "softmax.png").read_bytes().startswith(b"\x89PNG")


def test_plot_chooses_a_gpu(folder, monkeypatch):
    """Yours, else one with most results."""
    (folder / "b.jsonl").write_text((folder / "b.jsonl").read_text() * 2)
    out = call("plot", "softmax").stdout
    assert out == "drawn to softmax.png: NVIDIA B\n--gpu chooses another of NVIDIA A, NVIDIA B\n"
    monkeypatch.setattr(environment, "gpu_name", lambda: "NVIDIA A")
    assert "softmax.png: NVIDIA A" in call("plot", "softmax").stdout


def test_results_of_the_package_are_used_where_there_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "drawn to square.png: NVIDIA H200" in call("plot", "square").stdout
    assert re.search(
        r"A: NVIDIA H100.*\nB: NVIDIA H200", call("compare", "h100", "h200", "--op", "rope_qk").stdout
    )
    start = time.process_time()
    call("report")
    assert time.process_time() - start <= 5 and (tmp_path / "report.html").stat().st_size <= 1_500_000


def test_bench_draws_lines_into_a_folder(tmp_path):
    out = call(
        "bench",
        "rope",
        1,
        8,
        2,
        8,
        "--over",
        "S=4,8,16",
        "--only",
        "torch",
        "--seconds",
        "0.03",
        "--plot",
        tmp_path,
    ).stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rope_bw.png", "rope_fw.png"]
    assert out.count("rope fwd") == 3 and all(f"1 x {s} x 2 x 8" in out for s in (4, 8, 16))


def test_compare_two_gpus_and_two_commits(folder):
    out = call("compare", "a.jsonl", "b.jsonl").stdout
    assert (
        "A: NVIDIA A" in out
        and "B: NVIDIA B" in out
        and "12 in common" in out
        and re.search(r"softmax +12 +3\.000", out)
    )
    out = call("compare", "a.jsonl@aaaa", "a.jsonl@bbbb", "--most", 1, "--peers", "--plot", "x.png").stdout
    assert "24 in common" in out and re.search(r"softmax +12 +0\.500", out) and (folder / "x.png").is_file()
    assert all(len(row) <= 80 for row in out.splitlines() if "x.png" not in row)


REFUSED = {
    "plot layernorm": "no recorded result of 'layernorm'",
    "plot softmax 9": "no recorded result of 'softmax' has these sizes, dtype, pass and GPU",
    "plot softmax --dtype x": "--dtype must be one of d (float64)",
    "plot softmax --from none.jsonl": "none.jsonl",
    "plot softmax --from broken.jsonl": "broken.jsonl:1 is not a record of cukern bench: KeyError: 'op'",
    "plot softmax --from empty.jsonl": "there are no recorded results",
    "plot softmax --gpu a --out x.y": "--plot must name a file that ends with",
    "compare a.jsonl@cccc b.jsonl": "a.jsonl has no results of commit 'cccc'",
    "compare none.jsonl b.jsonl": "'none.jsonl' is neither a file nor a GPU of the recorded results",
    "compare a.jsonl b.jsonl --op rope": "have no measurement in common of 'rope'",
    "report --op rope": "no recorded result of 'rope'",
    "bench rope 1 8 2 8 --over Q=1,2": "--over must be one of B, S, H, D with its values, such as "
    "B=512,1024,2048, got 'Q=1,2'",
    "bench rope 1 8 2 8 --over S=1,x": "got 'S=1,x'",
    "bench rope 1 8 2 8 --over S=1 --host": "--over is for device times",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused(command, folder):
    (folder / "broken.jsonl").write_text("{}\n") if "broken" in command else None
    (folder / "empty.jsonl").write_text("") if "empty" in command else None
    assert REFUSED[command] in refused(*command.split())


# ---- report


def test_report_is_one_page_that_loads_nothing(folder):
    call("report", "-o", "page.html")
    page = (folder / "page.html").read_text()
    assert page.count("<svg") == 4 and "<script" not in page, "a roofline and a history per GPU"
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
    bars = re.findall(r"<span>([^<]+)</span><i style=\"width:([\d.]+)%;background:([^\"]+)\"", page)
    assert [bar[:2] for bar in bars[:4]] == [
        ("cukern v1", "50.0"), ("cukern v2", "100.0"), ("torch", "33.3"), ("copy", "33.3")
    ]  # fmt: skip
    assert len({color for _, _, color in bars[:4]}) == 3, "one of cukern, one of each peer"
    points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', page)
    assert len(points) > 8 and all(42 <= float(x) <= 392 and 8 <= float(y) <= 226 for x, y in points)
    assert not re.search(r'(?:src|href)="(?!#)(?!http://www\.w3\.org)', page), "nothing is loaded"
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) and {m for m in re.findall(r'href="#([^"]+)"', page)} <= set(ids)


CHROMIUM = next(
    filter(
        None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell"))
    ),
    None,
)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome on the PATH")
def test_report_in_a_browser(folder):
    """A browser parses the page, and its picture is neither empty nor of one color."""
    from matplotlib import image

    call("report", "--out", "page.html")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1000,1400",
        f"--user-data-dir={folder / 'profile'}",
    ]
    page = (folder / "page.html").as_uri()
    dom = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", page], capture_output=True, text=True, timeout=60
    ).stdout
    assert dom.count("<svg") == 4 and dom.count("<h3") == 2 and "NVIDIA B" in dom
    subprocess.run(
        [CHROMIUM, *options, f"--screenshot={folder / 'page.png'}", page],
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert image.imread(folder / "page.png").std() > 0.05


def test_the_recorded_results_of_this_tree_can_be_read():
    files = sorted((TREE / "benchmarks/results").glob("*.jsonl"))
    if not files:
        pytest.skip("this tree has no recorded results")
    assert all(record.read(file) for file in files)
