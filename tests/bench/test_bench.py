"""cukern.bench: timing must be sane, records must stay, tables must not change by themselves."""

import dataclasses
import importlib.util
import json
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import TREE, gpu
from turn import TURN

from cukern.bench import (
    attention_shapes,
    calls,
    environment,
    fused_loss,
    llama_block,
    lokr,
    models,
    optimizers,
    own_kernel,
    peers,
    record,
    startup,
    timing,
)
from cukern.bench.measure import Row, copies, measure, measure_host, passes, providers
from cukern.cli import profile
from cukern.cli.bench import _columns
from cukern.runtime.compile import cache
from cukern.runtime.registry import CASES

CPU = torch.device("cpu")
SQUARE, LINEAR = CASES["square"], CASES["linear"]


# ---- timing


def test_device_times_on_the_cpu():
    calls = {
        "one": [lambda: time.sleep(0.001)] * 2,
        "four": [lambda: time.sleep(0.004)],
        "bad": [lambda: 1 / 0],
    }
    times, failed = timing.device_times(calls, CPU, budget_s=0.2)
    assert (
        1000 <= times["one"].median_us < times["four"].median_us and 4000 <= times["four"].median_us < 40_000
    )
    assert isinstance(failed.pop("bad"), ZeroDivisionError) and not failed


def test_each_call_goes_to_the_next_set():
    seen = []
    timing.device_times({"a": [lambda i=i: seen.append(i) for i in range(3)]}, CPU, budget_s=0.01)
    assert len(seen) > 30 and seen[:30] == [0, 1, 2] * 10


def test_providers_take_turns():
    order = []
    timing.host_times(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, rounds=20, count=5
    )
    rounds = "".join(order)[20:]  # before: five calls of each for their length, and a round to warm up
    assert rounds.count("a") == rounds.count("b") == 100
    assert {rounds[i : i + 10] for i in range(0, 200, 10)} == {"aaaaabbbbb", "bbbbbaaaaa"}, (
        "each round has both, in random order"
    )


def test_host_time_is_of_one_call():
    times = timing.host_times({"sleep": lambda: time.sleep(0.0005)}, CPU, rounds=3, count=10)
    assert 500 <= times["sleep"].median_us < 4000


def test_summary_is_median_and_quartiles():
    assert timing.summary([1, 2, 3, 4, 100], "why") == timing.Timing(3, 2, "why")
    assert timing.summary([5.0]) == timing.Timing(5, 0)


# ---- measure and peers


@pytest.mark.parametrize("total", [1, 1000, 999_999, 2**25 + 1280, 10**8])
def test_copies_are_as_large_as_the_call_and_of_whole_pages(total):
    one, two = copies(total, 2, torch.device("cpu"))
    moved = 2 * one().nbytes
    assert one().data_ptr() != two().data_ptr()
    assert moved == 256 if total < 256 else 0.998 * total - 256 < moved <= total
    assert moved % (2 * 8192 if total >= 2**25 else 256) == 0


def test_measure_all_passes_on_the_cpu():
    assert passes(LINEAR, (8, 8, 8), torch.float32, None) == ["fwd", "bwd", "bwd:x", "bwd:weight"]
    for name in ("fwd", "bwd", "bwd:x", "bwd:weight"):
        table = measure(LINEAR, (8, 16, 4), torch.float32, name, CPU, ["cukern", "torch"], budget_s=0.02)
        assert [(r.provider, r.version) for r in table.rows] == [
            ("cukern", "cublas"),
            ("cukern", "reference"),
            ("torch", ""),
        ]
        assert {r.pass_ for r in table.rows} == {name}
        assert all(0 < r.median_us < 1e5 and r.of_limit is None and 0 <= r.error < 1e-6 for r in table.rows)
    with pytest.raises(ValueError, match="no pass 'bwd:y'"):
        passes(LINEAR, (8, 8, 8), torch.float32, ["bwd:y"])


def test_measure_differentiates_only_what_is_wanted(monkeypatch):
    wanted = []
    grad = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd,
        "grad",
        lambda y, leaves, *a, **k: (
            wanted.append([tuple(x.shape) for x in leaves]) or grad(y, leaves, *a, **k)
        ),
    )
    for name, shapes in {"bwd:weight": [(16, 4)], "bwd": [(8, 4), (16, 4), (16,)]}.items():
        wanted.clear()
        measure(LINEAR, (8, 16, 4), torch.float32, name, CPU, ["torch"], budget_s=0.01)
        assert wanted and all(w == shapes for w in wanted)


def test_a_peer_without_backward_is_missing_and_ours_is_an_error(monkeypatch):
    monkeypatch.setitem(peers._EAGER, "square", {"torch": torch.square, "a*a": lambda x: x.detach() * 2})
    table = measure(SQUARE, (10,), torch.float32, "bwd", CPU, ["torch", "a*a"], budget_s=0.01)
    assert [r.provider for r in table.rows] == ["torch"] and "no backward" in table.missing["a*a"]
    broken = dataclasses.replace(SQUARE, call=lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure(broken, (10,), torch.float32, "fwd", CPU, ["cukern"], budget_s=0.01)


def test_a_reference_that_does_not_fit_in_memory_only_leaves_out_the_errors(monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("cukern.bench.measure.errors", no_memory)
    table = measure(SQUARE, (100,), torch.float32, "fwd", CPU, ["torch"], 0.01)
    assert [row.error for row in table.rows] == [None] and "does not fit in memory" in table.notes["errors"]
    without = dataclasses.replace(SQUARE, reference=no_memory)
    assert [y.shape for y in calls.draw_douts(without, SQUARE.make((7,), torch.float32, CPU))] == [(7,)]


def test_measure_host_has_a_table_for_each_pass():
    tables = measure_host(SQUARE, (8,), torch.float32, CPU, ["cukern", "torch"])
    assert [t.rows[0].pass_ for t in tables] == ["host fwd", "host fwd grad", "host bwd"]
    assert all([r.provider for r in t.rows] == ["cukern", "torch"] for t in tables)
    assert all(0 < r.median_us < 1000 and not r.bytes and r.tbps is None for t in tables for r in t.rows)
    (one,) = measure_host(CASES["adamw"], (2, 8), torch.float32, CPU, ["torch"])
    assert one.rows[0].pass_ == "host fwd", "it has no gradient"


def test_measure_two_outputs_written_in_place():
    for name in ("fwd", "bwd", "bwd:q"):
        table = measure(TURN, (100,), torch.float32, name, CPU, ["cukern", "torch"], budget_s=0.02)
        assert {r.provider for r in table.rows} == {"torch", "cukern"} and not table.missing  # by speed
        assert all(0 < r.median_us < 1e5 and 0 <= r.error < 1e-6 for r in table.rows)
    half = dataclasses.replace(TURN, call=lambda q, k, cos, sin, at: TURN.call(q, k, cos, sin * 0.5, at))
    table = measure(half, (100,), torch.float32, "bwd", CPU, ["cukern"], budget_s=0.02)
    assert table.rows[0].error > 0.1


def test_forward_in_place_is_timed_on_the_inputs_themselves(monkeypatch):
    seen = set()
    case = dataclasses.replace(TURN, call=lambda *x: seen.add(x[0].data_ptr()) or TURN.call(*x))
    drawn = case.make((100,), torch.float32, CPU)
    case = dataclasses.replace(case, make=lambda *_: drawn)
    measure(case, (100,), torch.float32, "fwd", CPU, ["cukern"], budget_s=0.02)
    assert drawn[0].data_ptr() in seen and len(seen) == 2, "and once, for the error, on a copy"


def test_measure_host_in_place():
    without, with_grad, alone = measure_host(TURN, (8,), torch.float32, CPU, ["cukern", "torch"])
    assert all(
        [r.provider for r in t.rows] == ["cukern", "torch"] and not t.missing
        for t in (without, with_grad, alone)
    )
    assert with_grad.rows[0].median_us > 0


def test_profile_steps_in_place():
    step = profile.stepper(TURN, (8,), torch.float32, "reference", CPU)
    assert len(step()) == 4


def test_unknown_providers_are_refused():
    with pytest.raises(ValueError, match="no 'cublas' to measure"):
        providers(SQUARE, CPU, ["cublas"])
    assert list(providers(SQUARE, CPU, ["a*a"])[0]) == [("a*a", "")]
    _, missing = providers(SQUARE, CPU, None)
    assert {"v1", "v2", "triton", "load_inline"} <= set(missing)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_peers_compute_the_op(case):
    inputs = case.make(case.check_dims[-1], torch.float64, CPU)
    for name, function in peers.peers(case, CPU)[0].items():
        torch.testing.assert_close(
            function(*calls.arguments(case, inputs)), case.reference(*inputs), msg=name
        )


def test_rates():
    row = Row(
        "op",
        "v1",
        "fwd",
        (1,),
        "float32",
        "cukern",
        median_us=100.0,
        iqr_us=1.0,
        bytes=4 * 10**8,
        flops=10**9,
    )
    assert row.tbps == pytest.approx(4.0) and row.tflops == pytest.approx(10.0)


def test_peak_of_an_h200(monkeypatch):
    h200 = SimpleNamespace(major=9, minor=0, multi_processor_count=132, clock_rate=1980000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    cuda = torch.device("cuda", 0)
    assert environment.peak_flops(cuda, torch.float32) == pytest.approx(66.9e12, rel=1e-3)
    assert environment.peak_flops(cuda, torch.float64) == pytest.approx(33.45e12, rel=1e-3)
    assert environment.peak_flops(CPU, torch.float32) is None
    monkeypatch.setattr(environment, "gpu_name", lambda: "NVIDIA H200")
    assert (
        environment.peak_flops(cuda, torch.bfloat16)
        == 2 * environment.peak_flops(cuda, torch.float32, tf32=True)
        == 988.8e12
    )
    monkeypatch.setattr(environment, "gpu_name", lambda: "unknown")
    assert environment.peak_flops(cuda, torch.float16) is None


@pytest.mark.parametrize(
    ("full", "short"), [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), (None, "cpu")]
)
def test_short_name(monkeypatch, full, short):
    monkeypatch.setattr(environment, "gpu_name", lambda: full)
    assert environment.short_name() == short


# ---- on a GPU

CUDA = torch.device("cuda", 0)


@gpu
@pytest.mark.parametrize("dims", [(1 << 14,), (1 << 20,), (1 << 26,)], ids=str)
@pytest.mark.parametrize("name", ["fwd", "bwd"])
def test_measure_a_memory_bound_op(name, dims):
    table = measure(SQUARE, dims, torch.float32, name, CUDA, ["cukern", "torch", "copy"], budget_s=0.2)
    assert [r.version or r.provider for r in table.rows] == [*SQUARE.op.versions, "torch", "copy"]
    assert all(r.of_limit is not None and 0 < r.of_limit < 5 for r in table.rows)
    assert all(r.tbps < 30 for r in table.rows)
    assert not [note for key, note in table.notes.items() if key != "all"], (
        "every provider can be captured in a graph"
    )


@gpu
@pytest.mark.parametrize("name", ["fwd", "bwd", "bwd:x", "bwd:weight"])
def test_measure_a_compute_bound_op(name):
    table = measure(LINEAR, (256, 128, 64), torch.float32, name, CUDA, ["cukern", "torch"], budget_s=0.2)
    assert [r.version or r.provider for r in table.rows] == [*LINEAR.op.versions, "torch"]
    assert all(0 < r.of_limit < 1 for r in table.rows) and not [k for k in table.notes if k != "all"]


# ---- record and tables

COLUMNS = (
    "op version pass shape dtype provider median_us iqr_us bytes flops tbps tflops of_limit error peak_mib "
    "commit dirty gpu driver torch cupy nvrtc date"
)


def row(**changes):
    return dataclasses.replace(
        Row("square", "v1", "fwd", (4, 5), "float32", "cukern", 10.0, 0.5, 160, 20, 0.9), **changes
    )


def test_record_appends_and_never_overwrites(tmp_path):
    file = tmp_path / "gpu.jsonl"
    file.write_text('{"kept": 1}\n')
    record.append([row(), row(provider="copy", version="")], file)
    record.append([row(median_us=20.0)], file)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0] == {"kept": 1} and len(lines) == 4
    assert all(" ".join(line) == COLUMNS for line in lines[1:])
    assert [line["median_us"] for line in lines[1:]] == [10, 10, 20]
    assert (
        lines[1]["shape"] == [4, 5]
        and lines[1]["tbps"] == pytest.approx(1.6e-5)
        and lines[1]["torch"] == torch.__version__
    )


def test_record_goes_to_the_source_tree(tmp_path, monkeypatch):
    (tmp_path / "tree/benchmarks").mkdir(parents=True)
    (tmp_path / "tree/benchmarks/tables.py").touch()
    (tmp_path / "tree/a/b").mkdir(parents=True)
    name = f"{environment.short_name()}.jsonl"
    monkeypatch.chdir(tmp_path / "tree/a/b")
    assert record.default_file() == tmp_path / "tree/benchmarks/results" / name
    record.append([row()], record.default_file())
    assert len((tmp_path / "tree/benchmarks/results" / name).read_text().splitlines()) == 1
    monkeypatch.chdir(tmp_path)
    assert record.default_file() == tmp_path / name


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("tables", TREE / "benchmarks/tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_show_the_newest_row(tmp_path, tables, monkeypatch):
    clean = {**environment.facts(), "dirty": False}
    monkeypatch.setattr(environment, "facts", lambda: clean)
    record.append(
        [row(median_us=11.0), row(median_us=22.0), row(provider="torch", version="", median_us=33.0)],
        tmp_path / "h200.jsonl",
    )
    found = tables.read(tmp_path)
    assert list(found) == ["h200"] and list(found["h200"]) == ["square"]
    text = tables.markdown(found["h200"]["square"])
    assert "| 22 |" in text and "| 33 |" in text and "| 11 |" not in text


def test_results_keep_one_row_of_each_measurement_of_code_that_exists(tables):
    def line(median_us, op="kron_linear", version="v4", provider="cukern", dirty=False, n=64):
        key = {
            "op": op,
            "version": version,
            "pass": "fwd",
            "shape": [1, n],
            "dtype": "float32",
            "provider": provider,
            "gpu": "H",
        }
        return json.dumps(key | {"dirty": dirty, "bytes": n, "median_us": median_us}) + "\n"

    lines = [
        line(1),
        line(2, dirty=True),
        line(3, version="v99"),
        line(4, version="v4 --without gone"),
        line(5, version="v4 --kernel tile"),
    ]
    lines += [
        line(5, version="v4 --kernel tile"),
        line(6, version="v4 --without tile,cublas"),
        line(7, version="v4 --without gone,tile"),
    ]
    lines += [
        line(8),
        line(9, provider="copy", version=""),
        line(10, "rope", "", "copy"),
        line(11, provider="copy", version="", n=65),
    ]
    assert [json.loads(kept)["median_us"] for kept in tables.kept("".join(lines)).splitlines()] == [
        5,
        6,
        8,
        10,
        11,
    ]


def test_generated_tables_are_current(tables):
    """The tables, and the README's summary. After new results: python benchmarks/tables.py."""
    stale = [
        file.name
        for file, text in tables.files(tables.read()).items()
        if not file.exists() or file.read_text() != text
    ]
    assert stale == []


# ---- startup


def test_a_corrupt_cache_is_seen(empty_cache):
    kernel = next(iter(SQUARE.op.kernels(90, (torch.float32,)).values()))
    kernel.compile("sm_90a")
    assert startup.verify_cache(empty_cache) == 1
    cubin = next(empty_cache.glob(f"*{cache.SUFFIX}"))
    code = cubin.read_bytes()
    cubin.write_bytes(code[:-1])
    with pytest.raises(RuntimeError, match="corrupt cache entry"):
        startup.verify_cache(empty_cache)
    cubin.write_bytes(code)
    (empty_cache / ".tmp1").touch()
    with pytest.raises(RuntimeError, match="left-over"):
        startup.verify_cache(empty_cache)


def test_startup_rows(monkeypatch):
    monkeypatch.setattr(startup, "REPEATS", 1)
    monkeypatch.setattr(startup, "AT_ONCE", 2)
    monkeypatch.setattr(startup, "COMPILED", "square")
    for code in ("_FIRST_CALL", "_COMPILE"):  # CPU time, which other processes lengthen little
        monkeypatch.setattr(startup, code, getattr(startup, code).replace("perf_counter", "process_time"))
    first, *others, last = startup.measure_startup()
    assert [r.pass_ for r in first.rows] == ["import"] and [len(t.rows) for t in others] == [3] * len(
        startup._ops()
    )
    assert all(r.op == "startup" and 0 < r.median_us < 1e8 for t in (first, *others, last) for r in t.rows)
    templates = {name.split("<")[0] for name in CASES["square"].op.kernels(90, (torch.bfloat16,))}
    assert {r.pass_.split()[1] for r in last.rows} == templates == {*last.notes}
    assert others[0].rows[1].median_us < others[0].rows[0].median_us, (
        "a full cache is faster than an empty one"
    )
    assert [r.pass_ for t in startup.measure_startup(["compile"]) for r in t.rows] == [
        r.pass_ for r in last.rows
    ]
    with pytest.raises(ValueError, match="'nothing'"):
        next(startup.measure_startup(["nothing"]))


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs
def test_llama_block_compiles_to_the_same_results():
    sizes = 2, 1, 16, 48
    eager, compiled = (call() for call in llama_block.steps(2, 8, *sizes).values())
    assert len(eager) == 9
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b)
    (table,) = llama_block.measure_llama_block(0.01, ((1, 8),), *sizes)
    assert [(r.name, r.shape) for r in table.rows] == [("cukern eager", (1, 8)), ("cukern compiled", (1, 8))]
    assert all(r.op == "llama_block" and r.median_us > 0 for r in table.rows)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon needs torch 2.9")
def test_optimizers_next_to_torchs(monkeypatch):
    assert len(optimizers.parameters(12, 768)) == 148
    monkeypatch.setattr(optimizers, "VOCABULARY", 40)
    tables = list(optimizers.measure_optimizers(0.01, ((1, 8),)))
    found = [(r.op, r.dtype, r.pass_, r.name) for table in tables for r in table.rows if r.median_us > 0]
    both, passes = ["cukern", "torch"], ("step", "host step")
    assert found == [
        *(("adamw_optimizer", "float32", pass_, name) for pass_ in passes for name in both),
        *(
            ("adamw_optimizer", "bfloat16", pass_, name)
            for pass_ in passes
            for name in (*both, "cukern state_dtype=bfloat16")
        ),
        *(("muon", "float32", "step", name) for name in both),
    ]


@pytest.mark.parametrize("name", ["softmax", "rmsnorm", "layernorm", "swiglu", "cross_entropy", "rope_te"])
def test_a_package_that_is_missing_says_how_to_install_it(name, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    found, missing = peers.peers(CASES[name], torch.device("cuda"))
    assert "torch" in found and len(missing) > 1
    packages = {"liger": "liger-kernel", "quack": "quack-kernels", "transformer_engine": "transformer-engine"}
    for name in missing.keys() & packages.keys():
        assert missing[name].endswith(f"is not installed: pip install {packages[name]}")


def test_own_kernel(monkeypatch):
    monkeypatch.setattr(own_kernel, "REPEATS", 1)
    there = torch.cuda.is_available()
    *launches, first, second = own_kernel.measure_own_kernel(
        ["cukern", "_compile_kernel" if there else "load_inline"]
    )
    assert [(r.pass_, r.provider) for t in (first, second) for r in t.rows][:1] == [("first run", "cukern")]
    assert {r.pass_ for r in second.rows} == {"second run"} and all(
        r.median_us > 0 for r in (*first.rows, *second.rows)
    )
    if not there:
        assert not launches and first.missing == {"load_inline": "there is no GPU"}
    else:
        assert {r.provider for r in launches[0].rows} | first.missing.keys() == {"cukern", "_compile_kernel"}


def test_own_kernel_refuses_unknown_peers():
    with pytest.raises(ValueError, match="there is no 'nvcc' to measure for own_kernel; there are cukern"):
        list(own_kernel.measure_own_kernel(["nvcc"]))


def test_startup_reports_a_process_that_fails():
    with pytest.raises(RuntimeError, match="status 1"):
        startup.fresh_seconds("raise SystemExit(1)")
    with pytest.raises(RuntimeError, match="warned"):
        startup.fresh_seconds("import sys; sys.stderr.write('cukern could not'); print(1)")


@pytest.mark.parametrize("op", ("llama", "qwen3", "gemma2"))
def test_models_next_to_torch(op, monkeypatch):
    """An update of a tiny model, and its decoding, as it is and patched."""
    pytest.importorskip("transformers")
    sizes = dict(
        num_hidden_layers=1, hidden_size=32, vocab_size=64, intermediate_size=32, num_attention_heads=2
    )
    sizes |= dict(num_key_value_heads=1, head_dim=16)
    monkeypatch.setattr(models, "DECODED", 16)
    tables = list(models.measure_model(op, ["cukern", "torch"], 2, sizes, (1, 8)))
    kinds = [("update", (1, 8)), ("decode", (1, 16)), ("decode", (32, 16))]
    expected = [(provider, *kind) for provider in ("torch", "cukern") for kind in kinds]
    assert [(row.provider, row.pass_, row.shape[3:]) for table in tables for row in table.rows] == expected
    for table in tables:
        (row,) = table.rows
        assert not table.missing and row.shape[:3] == (1, 32, 64) and row.median_us > 0
        tokens = 8 if row.pass_ == "update" else row.shape[3]
        assert _columns([row])["tokens/s"](row) == f"{tokens / row.median_us * 1e6:.0f}"
    (table,) = models.measure_model(op, ["cukern"], 2, sizes, (1, 8), ["update"])
    assert [row.pass_ for row in table.rows] == ["update"]


@pytest.mark.filterwarnings("default")  # LyCORIS's
def test_lokr_layers_next_to_lycoris():
    """Both forms of w2, by every provider: the first tables' sizes and times."""
    pytest.importorskip("lycoris")
    tables = list(lokr.measure_lokr(None, 2, [(48, 64, 4, 0), (48, 64, 4, 2)], (8,)))
    assert [table.rows[0].shape for table in tables] == [(48, 64, 4, 0, 8), (48, 64, 4, 2, 8)]
    for table in tables:
        assert tuple(row.provider for row in table.rows) == lokr.PROVIDERS and not table.missing
        assert all(row.median_us > 0 for row in table.rows)


def test_fused_losses_next_to_torch():
    (table,) = fused_loss.measure_fused_loss(None, 2, [(8, 64, 16)])
    assert [row.provider for row in table.rows][:3] == ["cukern", "cukern logprobs", "torch.compile"]
    assert all(row.shape == (8, 64, 16) and row.median_us > 0 for row in table.rows)


def test_attention_over_shapes_and_caches():
    shapes = [(1, 4, 2, 40, 16, "causal"), (1, 2, 2, 40, 16, "full"), (1, 2, 2, 1100, 8, "window")]
    found = list(attention_shapes.measure_attention_shapes(None, 0.05, shapes, [(2, 4, 2, 256, 64)]))
    rows = [row for table in found for row in table.rows if row.provider == "cukern"]
    assert [(row.version, row.pass_) for row in rows] == [
        *((mask, pass_) for mask in ("causal", "full", "window") for pass_ in ("fwd", "bwd")),
        *((pages, "decode") for pages in ("", "pages of 16", "pages of 256")),
    ]
    # pairs of query and key that are visible: 40 * 41 / 2, 40 * 40, 1024 * 1025 / 2 + 76 * 1024
    visible = [820, 1600, 602624]
    assert [row.flops for row in rows[:6:2]] == [
        4 * b * h * d * n for (b, h, _, _, d, _), n in zip(shapes, visible, strict=True)
    ]
    assert all(row.median_us > 0 for row in rows)


def test_a_model_refuses_unknown_providers():
    with pytest.raises(ValueError, match=r"--only must be one of cukern, cukern logprobs, .*, got 'quack'"):
        next(fused_loss.measure_fused_loss(["quack"]))
    with pytest.raises(ValueError, match=r"--only must be one of cukern, cudnn, fa4, .*, got 'quack'"):
        next(attention_shapes.measure_attention_shapes(["quack"], 0.1))
    with pytest.raises(
        ValueError, match=r"(--only must be one of torch compiled, .*, got 'quack'|pip install)"
    ):
        next(models.measure_model("llama", ["quack"]))
    with pytest.raises(ValueError, match=r"(--only must be one of lycoris, .*, got 'quack'|pip install)"):
        next(lokr.measure_lokr(["quack"]))
