"""The cache of cubins: hits, edits, damage, folders of others, many users, threads and processes. Needs no
GPU."""

import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import SCALE, TREE, count_compilations, forget_cache, run, run_python, write

import cukern
from cukern.runtime.compile import cache

ARCH = "sm_90a"
OTHER = 12345  # the uid of a user who owns no file here
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def test_second_call_compiles_nothing(empty_cache, monkeypatch):
    calls = count_compilations(monkeypatch)
    first = cukern.compile(SCALE).compile(ARCH)
    forget_cache()
    second = cukern.compile(SCALE).compile(ARCH)
    assert len(calls) == 1 and first == second and first.code[:4] == b"\x7fELF"
    assert not [p for p in empty_cache.iterdir() if p.suffix != cache.SUFFIX], "no temporary file is left"


def test_a_second_process_compiles_nothing_and_does_not_even_import_cupy(tmp_path):
    code = f"""
import sys, cukern
cubin = cukern.compile({SCALE!r}).compile({ARCH!r})
print(cubin.symbol, len(cubin.code), "cupy" in sys.modules)
"""
    first, second = (
        run_python(code, CUKERN_CACHE_DIR=str(tmp_path / "cache")).stdout.split() for _ in range(2)
    )
    assert first[2] == "True" and second[2] == "False", "the first process loads NVRTC, the second must not"
    assert first[:2] == second[:2] == ["scale", first[1]]


def test_each_instance_and_architecture_is_compiled(empty_cache, monkeypatch):
    calls = count_compilations(monkeypatch)
    text = "template <typename T> __global__ void k(T* x) { x[threadIdx.x] *= 2; }\n"
    cubins = [
        cukern.compile(text, name).compile(arch)
        for name in ("k<float>", "k<double>")
        for arch in ("sm_80", ARCH)
    ]
    cubins.append(cukern.compile(text.replace("2", "3"), "k<float>").compile(ARCH))
    assert len(calls) == 5 and len({c.code for c in cubins}) == 5


def test_edited_header_is_recompiled(tmp_path, empty_cache, monkeypatch):
    calls = count_compilations(monkeypatch)
    write(tmp_path, "#define FACTOR 2\n", "factor.cuh")
    path = write(tmp_path, '#include "factor.cuh"\n__global__ void k(float* x) { x[0] *= FACTOR; }\n')
    before = cukern.load(path).compile(ARCH)
    assert cukern.load(path).compile(ARCH) == before and len(calls) == 1
    write(tmp_path, "#define FACTOR 3\n", "factor.cuh")
    assert cukern.load(path).compile(ARCH).code != before.code and len(calls) == 2


def signed(path: Path, body: bytes) -> bytes:
    """An entry with a correct digest and other content, as only a bug or a newer cukern would write it."""
    return cache._digest(path.stem, body) + b"\n" + body


DAMAGE = {
    "empty": lambda p, old: p.write_bytes(b""),
    "longer": lambda p, old: p.write_bytes(old + b"!"),
    "symbol flipped": lambda p, old: p.write_bytes(old.replace(b'"scale', b'"skale')),
    "code flipped": lambda p, old: p.write_bytes(old[:-9] + bytes([old[-9] ^ 1]) + old[-8:]),
    "signed nested": lambda p, old: p.write_bytes(signed(p, b"[" * 200_000)),
    "signed list": lambda p, old: p.write_bytes(signed(p, b"[]\n")),
    "signed words": lambda p, old: p.write_bytes(signed(p, b'{"report": "words"}\n')),
    "not UTF-8": lambda p, old: p.write_bytes(signed(p, b"\xff\xfe\n")),
    "huge": lambda p, old: os.truncate(p, 1 << 40),
    "fifo": lambda p, old: (p.unlink(), os.mkfifo(p)),
    "folder": lambda p, old: (p.unlink(), (p / "in").mkdir(parents=True)),
    "link to itself": lambda p, old: (p.unlink(), p.symlink_to(p)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_cache_is_mended_with_one_warning(empty_cache, monkeypatch, kind):
    kernels = [cukern.compile(SCALE), cukern.compile(SCALE.replace("scale", "scale_more"))]
    good = [k.compile(ARCH) for k in kernels]
    for path in empty_cache.iterdir():
        DAMAGE[kind](path, path.read_bytes())
    forget_cache()
    calls = count_compilations(monkeypatch)
    with pytest.warns(UserWarning, match="cannot use") as caught:
        again = [k.compile(ARCH) for k in kernels]
    assert len(caught) == 1 and str(empty_cache) in str(caught[0].message)
    assert again == good and len(calls) == 2
    forget_cache()
    assert [k.compile(ARCH) for k in kernels] == again and len(calls) == 2, "the entries are whole again"


def test_entries_of_a_newer_cukern_are_left_alone(empty_cache, monkeypatch):
    old = cache.SUFFIX
    monkeypatch.setattr(cache, "SUFFIX", ".kernel3")
    cukern.compile(SCALE).compile(ARCH)
    (newer,) = empty_cache.iterdir()
    before = newer.read_bytes()
    monkeypatch.setattr(cache, "SUFFIX", old)
    assert cukern.compile(SCALE).compile(ARCH).symbol == "scale"
    assert newer.read_bytes() == before and {p.suffix for p in empty_cache.iterdir()} == {old, ".kernel3"}


def test_an_interrupt_just_after_a_write_arrives(empty_cache, monkeypatch):
    def late(*args: object) -> None:
        rename(*args)
        raise KeyboardInterrupt

    rename = os.replace
    monkeypatch.setattr(os, "replace", late)
    with pytest.raises(KeyboardInterrupt):
        cukern.compile(SCALE).compile(ARCH)
    assert [p.suffix for p in empty_cache.iterdir()] == [cache.SUFFIX], (
        "the entry is whole, nothing else is left"
    )


def test_files_of_killed_writers_are_removed_after_a_day(empty_cache):
    empty_cache.mkdir()
    for name, age in (("old", 90_000), ("new", 80_000)):
        path = write(empty_cache, "", cache.TEMPORARY + name)
        os.utime(path, (time.time() - age,) * 2)
    cukern.compile(SCALE).compile(ARCH)
    assert [p.name for p in empty_cache.iterdir() if p.suffix != cache.SUFFIX] == [cache.TEMPORARY + "new"]


# ---- folders


def test_the_next_folder_is_used_with_one_warning_if_one_cannot_be_created(
    tmp_path, empty_cache, monkeypatch
):
    write(tmp_path, "a file, not a folder", "file")
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "file/cache"))
    forget_cache()
    with pytest.warns(UserWarning, match="Not a directory") as caught:
        cubins = [cukern.compile(SCALE.replace("scale", name)).compile(ARCH) for name in ("one", "two")]
    assert (
        len(caught) == 1
        and str(tmp_path / "file/cache") in str(caught[0].message)
        and [c.symbol for c in cubins] == ["one", "two"]
    )
    assert len(list((tmp_path / "user/cukern").iterdir())) == 2, "they are in the user's own folder"


def test_a_user_without_a_home_has_a_folder(monkeypatch, tmp_path):
    """As in a container with an arbitrary uid, which is not in the list of users."""
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HOME", "XDG_CACHE_HOME", "CUKERN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    forget_cache()
    assert cukern.compile(SCALE).compile(ARCH).symbol == "scale"
    assert len(list(tmp_path.glob(f"cukern-{os.geteuid()}/*"))) == 1
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "named"))
    forget_cache()
    assert cache.cache_dir() == tmp_path / "named" and cache.target() == tmp_path / "named"


def test_cupy_is_imported_where_there_is_no_home(tmp_path):
    code = f"""
import cukern
print(cukern.compile({SCALE!r}).compile({ARCH!r}).symbol)
import cukern.cli, os, typer.testing
print(typer.testing.CliRunner().invoke(cukern.cli.app, ["doctor"]).stdout)
"""
    homeless = {
        "HOME": "/proc/none",
        "XDG_CACHE_HOME": "",
        "CUKERN_CACHE_DIR": "",
        "TMPDIR": str(tmp_path),
        "MPLCONFIGDIR": str(tmp_path),
    }
    done = run_python(code, **homeless)
    assert (
        done.stdout.startswith("scale\n")
        and "/proc/none/.cache/cukern is not used" in done.stdout
        and "NO" not in done.stdout
    )
    assert done.stderr.count("UserWarning") == 1 and "/proc/none/.cache/cukern (No such file" in done.stderr
    assert len(list(tmp_path.glob(f"cukern-*/*{cache.SUFFIX}"))) == 1


@pytest.mark.parametrize(
    ("place", "mode", "owner", "why"),
    [
        *(("folder", mode, None, f"mode {mode:o} lets other users write") for mode in (0o777, 0o775, 0o1777)),
        ("file", 0o666, None, "mode 666 lets other users write"),
        ("folder", 0o755, OTHER, f"belongs to user {OTHER}"),
        ("file", 0o644, OTHER, f"belongs to user {OTHER}"),
    ],
)
def test_files_that_another_user_could_have_written_are_not_loaded(
    tmp_path, empty_cache, place, mode, owner, why
):
    wrong, right = (cukern.compile(text).compile(ARCH) for text in (SCALE.replace("*=", "+="), SCALE))
    if owner and not ROOT:
        pytest.skip("needs root, to make files of another user")
    entries = list(empty_cache.iterdir())
    for path in entries:
        cache.write(path.stem, wrong)
    for path in entries if place == "file" else [empty_cache]:
        path.chmod(mode)
        os.chown(path, owner or -1, owner or -1)
    forget_cache()
    with pytest.warns(UserWarning, match=why) as caught:
        assert cukern.compile(SCALE).compile(ARCH) == right
    assert len(caught) == 1 and (tmp_path / "user").exists() == (place == "folder"), (
        "an entry is replaced, a folder is not used"
    )


def test_link_of_another_user_to_a_folder_of_ours_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "ours").mkdir(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    assert cache.refusal(tmp_path / "link") is None
    lstat = Path.lstat
    others = lambda path: os.stat_result((*lstat(path)[:4], 12345, *lstat(path)[5:]))  # noqa: E731
    monkeypatch.setattr(Path, "lstat", others)
    assert cache.refusal(tmp_path / "link") == "it belongs to user 12345"


@pytest.mark.skipif(not ROOT, reason="needs root, to become another user")
def test_a_cache_that_root_filled_serves_others():
    """The process changes its user late, because the other user may not be allowed to read Python's files."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        code = f"""
import os, warnings, pathlib, cukern
from cukern.runtime.compile import compiler
shared, private = pathlib.Path({folder!r}, "shared"), pathlib.Path({folder!r}, "private")
def compile(name):
    return cukern.compile({SCALE!r}.replace("scale", name)).compile({ARCH!r})
os.umask(0o022)
secret, known, nvrtc = compile("secret"), compile("known"), compiler.nvrtc
for path in shared.iterdir():
    if b"secret" in path.read_bytes(): path.chmod(0o600)  # as older cukerns wrote all
private.mkdir()
os.chown(private, {OTHER}, {OTHER})
os.setgroups([]), os.setgid({OTHER}), os.setuid({OTHER})
warnings.simplefilter("error")
compiler.nvrtc = None  # nothing can be compiled
assert compile("known") == known and not list(private.iterdir())
compiler.nvrtc = nvrtc
new = compile("fresh")
compiler.nvrtc = None
assert compile("fresh") == new
print(*sorted(oct(p.stat().st_mode)[-3:] for p in (shared, *shared.iterdir())))
print(*(f"{{p.stat().st_uid}} {{p.parent.name}}" for p in private.rglob("*.kernel*")))
compiler.nvrtc = nvrtc
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    assert [compile("secret") for _ in range(2)] == [secret, secret]
denied = len(caught) == 1 and "Permission denied" in str(caught[0].message)
print(denied, len(list(private.rglob("*.kernel*"))))
"""
        done = run_python(code, CUKERN_CACHE_DIR=f"{folder}/shared", XDG_CACHE_HOME=f"{folder}/private")
    assert done.stdout == f"600 644 755\n{OTHER} cukern\nTrue 2\n"


# ---- threads and processes


def test_threads_compile_a_kernel_once(empty_cache, monkeypatch):
    calls = count_compilations(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        cubins = list(pool.map(lambda _: cukern.compile(SCALE).compile(ARCH), range(16)))
    assert len(calls) == 1 and all(c == cubins[0] for c in cubins)


def test_four_processes_at_once_on_an_empty_cache(tmp_path):
    folder = tmp_path / "cache"
    code = f"""
import os, cupy, cukern
until_closed, start = os.pipe()
children = []
while len(children) < 4 and (not children or children[-1]):
    children.append(os.fork())
os.close(start)
if children[-1]:
    print([os.waitpid(child, 0)[1] for child in children])
else:
    os.read(until_closed, 1)
    for name in ("a", "b"):
        cukern.compile({SCALE!r}.replace("scale", name)).compile({ARCH!r})
"""
    result = run_python(code, CUKERN_CACHE_DIR=str(folder), PYTHONWARNINGS="error::UserWarning")
    assert result.stdout == f"{[0] * 4}\n", result.stderr
    assert sorted(json.loads(p.read_bytes().split(b"\n")[1])["symbol"] for p in folder.iterdir()) == [
        "a",
        "b",
    ]


def test_forks_while_threads_compile(tmp_path):
    """A forked child does not inherit a locked lock. The parent forks during the first import of CuPy, while
    another thread compiles, and in a thread that compiles."""
    code = """
import os, signal, sys, threading, time, cukern
from cukern.runtime.compile import compiler
from cukern.runtime.launch import backend
def forked():
    child = os.fork()
    if not child:
        signal.alarm(20)
        kernel.on(backend.SIMULATED)
        cukern.compile(f"__global__ void other{os.getpid()}() {{}}").compile("sm_90a")
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
def start(text, meanwhile=lambda: None):
    global kernel, thread
    kernel = cukern.compile(text)
    compiler.nvrtc = lambda binding=compiler.nvrtc: (meanwhile(), binding())[1]
    thread = threading.Thread(target=kernel.on, args=(backend.SIMULATED,))
    thread.start()
start("__global__ void first(float* x) { *x = 1.f; }")
while "cupy._core" not in sys.modules: time.sleep(0.001)
forked()
thread.join()
binding, compiling = compiler.nvrtc(), threading.Event()
compiler.nvrtc = lambda: binding
start("__global__ void second(float* x) { *x = 1.f; }", lambda: (compiling.set(), time.sleep(0.3)))
compiling.wait()
forked()
thread.join()
compiler.nvrtc = lambda: binding
def once():
    compiler.nvrtc = lambda: binding
    forked()
start("__global__ void third(float* x) { *x = 1.f; }", once)
thread.join()
"""
    assert run_python(code, timeout=100, CUKERN_CACHE_DIR=str(tmp_path / "cache")).stdout == "7\n7\n7\n"


def test_torture():
    done = run(
        [
            sys.executable,
            str(TREE / "tests" / "torture_cache.py"),
            "--kills",
            "10",
            "--corruptions",
            "40",
            "--forks",
            "12",
        ]
    )
    assert "no wrong kernel, no hang, no leftover" in done.stdout
