"""The cache of cubins: hits, edits, damage, folders that cannot be written, many threads and processes. Needs no GPU."""

import hashlib
import json
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import count_compilations, forget_cache, run_python

import cukern

ARCH = "sm_90a"
SCALE = 'extern "C" __global__ void scale(float* x, float s) { x[threadIdx.x] *= s; }\n'


def write(folder: Path, text: str, name: str = "k.cu") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_the_second_time_nothing_is_compiled(empty_cache, monkeypatch):
    calls = count_compilations(monkeypatch)
    first = cukern.compile(SCALE).compile(ARCH)
    forget_cache()
    second = cukern.compile(SCALE).compile(ARCH)
    assert len(calls) == 1 and first == second and first.code[:4] == b"\x7fELF"
    assert not [p for p in empty_cache.iterdir() if p.suffix not in (".cubin", ".json")], "no temporary file is left"


def test_a_second_process_compiles_nothing_and_does_not_even_import_cupy(tmp_path):
    code = f"""
import sys, cukern
cubin = cukern.compile({SCALE!r}).compile({ARCH!r})
print(cubin.symbol, len(cubin.code), "cupy" in sys.modules)
"""
    first, second = (run_python(code, CUKERN_CACHE_DIR=str(tmp_path / "cache")).stdout.split() for _ in range(2))
    assert first[2] == "True" and second[2] == "False", "the first process loads NVRTC, the second must not"
    assert first[:2] == second[:2] == ["scale", first[1]]


def test_what_changes_the_machine_code_is_compiled_apart(empty_cache, monkeypatch):
    calls = count_compilations(monkeypatch)
    text = "template <typename T> __global__ void k(T* x) { x[threadIdx.x] *= 2; }\n"
    cubins = [cukern.compile(text, name).compile(arch) for name in ("k<float>", "k<double>") for arch in ("sm_80", ARCH)]
    cubins.append(cukern.compile(text.replace("2", "3"), "k<float>").compile(ARCH))
    assert len(calls) == 5 and len({c.code for c in cubins}) == 5


def test_edit_of_an_included_header_is_compiled_anew(tmp_path, empty_cache, monkeypatch):
    calls = count_compilations(monkeypatch)
    write(tmp_path, "#define FACTOR 2\n", "factor.cuh")
    path = write(tmp_path, '#include "factor.cuh"\n__global__ void k(float* x) { x[0] *= FACTOR; }\n')
    before = cukern.load(path).compile(ARCH)
    assert cukern.load(path).compile(ARCH) == before and len(calls) == 1
    write(tmp_path, "#define FACTOR 3\n", "factor.cuh")
    assert cukern.load(path).compile(ARCH).code != before.code and len(calls) == 2


def damage(folder: Path, kind: str) -> None:
    for path in folder.glob("*.json" if "entry" in kind else "*.cubin"):
        content = path.read_bytes()
        if "truncated" in kind:
            path.write_bytes(content[: len(content) // 2])
        elif "empty" in kind:
            path.write_bytes(b"")
        elif kind == "foreign entry":
            path.write_text(json.dumps({"sha256": json.loads(content)["sha256"]}))
        elif kind == "foreign code":
            path.write_bytes(content + b"!")
        elif "list" in kind:
            path.write_bytes(b"[]")


@pytest.mark.parametrize(
    "kind", ["truncated entry", "empty entry", "foreign entry", "list entry", "truncated code", "empty code", "foreign code"]
)
def test_damaged_cache_is_mended_with_one_warning(empty_cache, monkeypatch, kind):
    kernels = [cukern.compile(SCALE), cukern.compile(SCALE.replace("scale", "scale_more"))]
    good = [k.compile(ARCH) for k in kernels]
    damage(empty_cache, kind)
    forget_cache()
    calls = count_compilations(monkeypatch)
    with pytest.warns(UserWarning, match="corrupt") as caught:
        again = [k.compile(ARCH) for k in kernels]
    assert len(caught) == 1 and str(empty_cache) in str(caught[0].message)
    assert [c.symbol for c in again] == [c.symbol for c in good] and len(calls) == 2
    forget_cache()
    assert [k.compile(ARCH) for k in kernels] == again and len(calls) == 2, "the entries are whole again"


def test_cubin_that_was_deleted_is_compiled_anew(empty_cache):
    before = cukern.compile(SCALE).compile(ARCH)
    for path in empty_cache.glob("*.cubin"):
        path.unlink()
    assert cukern.compile(SCALE).compile(ARCH) == before


def test_folder_that_cannot_be_made_is_worked_around_with_one_warning(tmp_path, empty_cache, monkeypatch):
    write(tmp_path, "a file, not a folder", "file")
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "file/cache"))
    forget_cache()
    with pytest.warns(UserWarning, match="cannot write") as caught:
        cubins = [cukern.compile(SCALE.replace("scale", name)).compile(ARCH) for name in ("one", "two")]
    assert len(caught) == 1 and str(tmp_path / "file/cache") in str(caught[0].message) and [c.symbol for c in cubins] == ["one", "two"]


def refuse(*args: object, **kwargs: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_folder_that_is_full_but_read_only_is_read(empty_cache, monkeypatch):
    """As in a container image that `cukern compile` filled: nothing is compiled there."""
    before = cukern.compile(SCALE).compile(ARCH)
    forget_cache()
    calls = count_compilations(monkeypatch)
    for name in ("TemporaryFile", "NamedTemporaryFile", "mkstemp"):
        monkeypatch.setattr(tempfile, name, refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cukern.compile(SCALE).compile(ARCH) == before
    assert not calls


def test_threads_compile_a_kernel_once(empty_cache, monkeypatch):
    calls = count_compilations(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        cubins = list(pool.map(lambda _: cukern.compile(SCALE).compile(ARCH), range(16)))
    assert len(calls) == 1 and all(c == cubins[0] for c in cubins)


def test_eight_processes_at_once_on_an_empty_cache(tmp_path):
    cache = tmp_path / "cache"
    code = f"""
import os, cupy, cukern
until_closed, start = os.pipe()
children = []
while len(children) < 8 and (not children or children[-1]):
    children.append(os.fork())
os.close(start)
if children[-1]:
    print([os.waitpid(child, 0)[1] for child in children])
else:
    os.read(until_closed, 1)
    for name in ("a", "b", "c", "d"):
        cukern.compile({SCALE!r}.replace("scale", name)).compile({ARCH!r})
"""
    result = run_python(code, CUKERN_CACHE_DIR=str(cache), PYTHONWARNINGS="error::UserWarning")
    assert result.stdout == f"{[0] * 8}\n", result.stderr
    entries = [json.loads(p.read_bytes()) for p in cache.glob("*.json")]
    assert sorted(e["symbol"] for e in entries) == ["a", "b", "c", "d"]
    assert all(hashlib.sha256((cache / f"{e['sha256']}.cubin").read_bytes()).hexdigest() == e["sha256"] for e in entries)
    assert not list(cache.glob(".*")), "no temporary file is left"
