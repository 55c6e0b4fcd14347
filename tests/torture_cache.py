"""Torture of the cache: `python tests/torture_cache.py --kills 1000 --corruptions 2000 --forks 100 --seed 0`.
Needs no GPU.

Kills processes that write, damages entries, plants those of another user (as root), forks while threads
compile. Each kernel that the cache gives is compared with a clean compilation. Ends with status 1 at the
first wrong one, at a hang, or at a file that is left behind.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from cukern.runtime.compile import cache, compiler
from cukern.runtime.compile.cache import Cubin
from cukern.runtime.compile.sources import Source

OTHER = 12345  # a user who owns nothing here
HANG_S = 60
FORK = multiprocessing.get_context("fork")
NAMES = [f"k{i}" for i in range(12)]
ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def use(folder: Path) -> Path:
    os.environ["CUKERN_CACHE_DIR"] = str(folder)
    return folder


def compile_one(name: str) -> Cubin:
    source = Source.from_text(f"__global__ void {name}(float* x) {{ x[threadIdx.x] += {name[1:]}.5f; }}\n")
    return compiler.compile_kernel(source, name, "sm_80")


class Torture:
    def __init__(self, folder: Path, seed: int):
        self.private, self.random = folder / "private", random.Random(seed)
        self.names, self.truth = {}, {}  # of each kernel, by its key in the cache
        for name in NAMES:  # each alone in a folder, whose entry tells its key
            clean, cubin = use(folder / "clean" / name), compile_one(name)
            key = next(clean.iterdir()).stem
            self.names[key], self.truth[key] = name, cubin
        self.keys = list(self.truth)
        self.cache = use(folder / "cache")
        self.fill()

    def entry(self, key: str) -> Path:
        return self.cache / (key + cache.SUFFIX)

    def compile(self, key: str, anew: bool = False) -> None:
        if anew:
            with contextlib.suppress(OSError):
                os.unlink(self.entry(key))
        assert compile_one(self.names[key]) == self.truth[key], f"a wrong kernel for {self.names[key]}"

    def fill(self) -> None:
        for key in self.keys:
            self.compile(key)

    def read(self, folder: Path) -> None:
        for entry in folder.glob(f"*{cache.SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                assert cache._decode(entry.stem, entry.read_bytes()) == self.truth[entry.stem], (
                    f"{entry} is wrong"
                )

    def write_forever(self, seed: float, user: int | None) -> None:
        """The work of a process that is killed."""
        choose = random.Random(seed)
        if user:
            self.private.mkdir(exist_ok=True)
            os.chown(self.private, user, user)
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.environ["XDG_CACHE_HOME"] = str(self.private)
        while True:
            key = choose.choice(self.keys)
            if choose.random() < 0.1:
                self.compile(key, anew=True)
            else:
                cache.write(key, self.truth[key])

    def kill(self) -> None:
        """Read while another process writes, and kill it: an entry is whole, or it is not there."""
        user = OTHER if ROOT and self.random.random() < 0.2 else None
        child = FORK.Process(target=self.write_forever, args=(self.random.random(), user), daemon=True)
        child.start()
        end = time.monotonic() + self.random.random() * 0.05
        try:
            while time.monotonic() < end:
                self.read(self.cache)
        finally:
            child.kill()
            child.join()
        assert child.exitcode == -signal.SIGKILL, "the writer failed before it was killed"
        self.read(self.cache)
        self.read(self.private / "cukern")

    def sweep(self) -> int:
        """A process's first write removes what the kills left, once it is a day old. Returns the number of
        files."""
        left = [p for p in self.cache.iterdir() if p.suffix != cache.SUFFIX]
        assert all(p.name.startswith(cache.TEMPORARY) for p in left), left
        for path in left[::2]:
            os.utime(path, (time.time() - 90_000,) * 2)
        cache._sweep.cache_clear()
        self.compile(self.keys[0], anew=True)
        assert {p for p in self.cache.iterdir() if p.suffix != cache.SUFFIX} == set(left[1::2]), "a leftover"
        return len(left)

    def corrupt(self) -> None:
        """Damage one or two entries: the kernels are right all the same, and afterwards the entries are
        too."""
        one, two = self.random.sample(self.keys, 2)
        self.random.choice(DAMAGE)(self, self.entry(one), self.entry(two))
        # of the warning that an entry is damaged: the second time there is none
        for action in ("ignore", "error"):
            with warnings.catch_warnings():
                warnings.simplefilter(action)
                self.compile(one)
                self.compile(two)

    def forks(self, count: int) -> None:
        done = threading.Event()

        def work(seed: int) -> None:
            choose = random.Random(seed)
            while not done.is_set():
                self.compile(choose.choice(self.keys), anew=True)

        with ThreadPoolExecutor(3) as pool:
            working = [pool.submit(work, seed) for seed in range(3)]
            try:
                for _ in range(count):
                    time.sleep(self.random.random() * 0.05)
                    child = FORK.Process(
                        target=self.compile, args=(self.random.choice(self.keys), True), daemon=True
                    )
                    child.start()
                    child.join(HANG_S)
                    assert child.exitcode == 0, "a child hangs, or has a wrong kernel"
            finally:
                done.set()
        for one in working:
            one.result()

    # ---- damage

    def flip(self, path: Path, _: Path) -> None:
        content = bytearray(path.read_bytes())
        for _ in range(self.random.choice((1, 1, 1, 3))):
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
        path.write_bytes(content)

    def truncate(self, path: Path, _: Path) -> None:
        os.truncate(path, self.random.randrange(path.stat().st_size))

    def swap(self, one: Path, two: Path) -> None:
        third = one.with_name("third")
        os.rename(one, third)
        os.rename(two, one)
        os.rename(third, two)

    def splice(self, one: Path, two: Path) -> None:
        head = self.random.randrange(one.stat().st_size)
        one.write_bytes(one.read_bytes()[:head] + two.read_bytes()[head:])

    def plant(self, path: Path, _: Path) -> None:
        """A wrong kernel with the right digest, but of another user, or one that another may have written."""
        cache.write(path.stem, replace(self.truth[path.stem], code=b"planted"))
        os.chown(path, OTHER, OTHER) if self.random.random() < 0.5 else path.chmod(0o666)


def instead(make: Callable[[Path, Path], object]) -> Callable[[Torture, Path, Path], None]:
    return lambda _, one, two: (one.unlink(), make(one, two))[0]


DAMAGE: list[Callable[[Torture, Path, Path], object]] = [
    *(Torture.flip, Torture.flip, Torture.truncate, Torture.swap, Torture.splice),
    *([Torture.plant] if ROOT else []),
    lambda _, one, two: one.write_bytes(two.read_bytes()),
    lambda t, one, two: one.write_bytes(t.random.randbytes(t.random.randrange(5000))),
    lambda _, one, two: os.truncate(one, 1 << 36),
    instead(lambda one, two: os.mkfifo(one)),
    instead(lambda one, two: (one / "in").mkdir(parents=True)),
    instead(lambda one, two: one.symlink_to(two)),
    instead(lambda one, two: os.link(two, one)),
    instead(lambda one, two: one.symlink_to(one)),
]


def hang(*args: object) -> None:
    raise AssertionError(f"no end within {HANG_S} s")  # TimeoutError is an OSError, which the cache survives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("kills", 20), ("corruptions", 100), ("forks", 5), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    wanted = parser.parse_args()
    compiler.nvrtc()
    signal.signal(signal.SIGALRM, hang)
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        os.chmod(folder, 0o755)
        torture = Torture(Path(folder), wanted.seed)
        for count, act in ((wanted.kills, torture.kill), (wanted.corruptions, torture.corrupt)):
            for _ in range(count):
                signal.alarm(HANG_S)
                act()
            torture.fill()
        left = torture.sweep()
        signal.alarm(HANG_S + 10 * wanted.forks)
        torture.forks(wanted.forks)
    print(
        f"{wanted.kills} kills left {left} temporary files, which went after a day; {wanted.corruptions} "
        f"corruptions;",
        end=" ",
    )
    print(f"{wanted.forks} forks; {1 + ROOT} users: no wrong kernel, no hang, no leftover")


if __name__ == "__main__":
    main()
