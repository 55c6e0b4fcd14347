"""The kernels of a user's own op, for each of its configurations, and which configuration a GPU uses."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from cukern.runtime import checks
from cukern.runtime.compile import cache
from cukern.runtime.compile.sources import Source
from cukern.runtime.device import device_of, forget_plans
from cukern.runtime.launch import backend
from cukern.runtime.launch.kernel import Kernel, cpp, planning
from cukern.runtime.launch.load import load

Config = Mapping[str, int | float | bool | str | torch.dtype | None]


class Kernels:
    """What forward and backward get as `kernels`: `kernels(NAME, *template_arguments)` is a kernel of the .cu
    file, `kernels(KERNEL)` one of Triton, `kernels.config` a dict of macros."""

    def __init__(self, source: Path | None, config: Config):
        self.config, self._source = config, source
        self._get = functools.lru_cache(None, typed=True)(functools.partial(_loaded, source, config))

    def __call__(self, name: Any, *arguments: Any) -> Any:
        if self._source is not None:
            return self._get(name, *arguments)
        if not hasattr(name, "__getitem__") or isinstance(name, str) or arguments:
            raise TypeError(
                f"kernels() takes a kernel of Triton, as source is None, got {checks.brief(name)}"
            )
        return _Nothing() if planning() else name


class _NoKernels(Kernels):
    """For fake tensors: launches nothing."""

    def __call__(self, name: Any, *arguments: Any) -> Any:
        return _Nothing()


class _Nothing:
    """In the place of a kernel."""

    def __call__(self, *args: Any, **options: Any) -> None: ...

    def __getitem__(self, grid: Any) -> "_Nothing":
        return self


def _loaded(source: Path | None, config: Config, name: str, *arguments: Any) -> Callable[..., None]:
    assert source is not None  # see Kernels
    return _launcher(load(source, f"{name}<{', '.join(map(cpp, arguments))}>" if arguments else name, config))


def _launcher(kernel: Kernel) -> Callable[..., None]:
    def launch(*args: Any, grid: Any, block: Any, shared: int = 0) -> None:
        if kernel.quick(args, grid, block, shared):
            return
        if planning():
            kernel.on(backend.SIMULATED)  # only lists the kernel
        elif grid != 0 and not (isinstance(grid, tuple | list) and 0 in grid):
            kernel(*args, grid=grid, block=block, shared=shared)

    return launch


class Configs:
    """The kernels of an op by configuration. A GPU uses the one that `cukern.tune` recorded for it, else the
    first one."""

    def __init__(self, name: str, source: Path | None, configs: Sequence[Config]):
        self.name, self.source = name, source
        self.all = [Kernels(source, config) for config in configs]
        self.none = _NoKernels(source, configs[0])
        self._by_device: dict[int, Kernels] = {}
        self._forced: Kernels | None = None

    def on(self, device: int) -> Kernels:
        """The kernels for a GPU, or for the simulator."""
        if self._forced or len(self.all) == 1:
            return self._forced or self.all[0]
        found = self._by_device.get(device)
        if found is None:
            found = self._by_device.setdefault(device, self.all[self._recorded(device)])
        return found

    @contextmanager
    def forced(self, index: int) -> Iterator[None]:
        """Inside the block, all devices use this configuration, in backward passes too."""
        before, self._forced = self._forced, self.all[index]
        forget_plans()
        try:
            yield
        finally:
            self._forced = before
            forget_plans()

    def _key(self, device: int) -> str:
        """An edit of the source, of a header that it includes, or of the configurations needs a new
        measurement."""
        assert self.source is not None  # without it there is one configuration
        parts = (
            self.name,
            Source.read(self.source).digest(),
            [{k: str(v) for k, v in one.config.items()} for one in self.all],
        )
        return f"{device_of(device).name} {hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"

    def _recorded(self, device: int) -> int:
        """The index of the recorded configuration, or 0."""
        index = _records().get(self._key(device), 0) if device != backend.SIMULATED else 0
        return index if 0 <= index < len(self.all) else 0

    def record(self, device: int, index: int) -> None:
        """Store the choice for this model of GPU. This process and later ones use it. Raises OSError."""
        file = _file()
        if file is None:
            raise OSError("no cache folder can be written: set CUKERN_CACHE_DIR")
        file.write_text(json.dumps({**_records(), self._key(device): index}, indent=1) + "\n")
        self._by_device[device] = self.all[index]
        forget_plans()


def _file() -> Path | None:
    folder = cache.target()
    return folder and folder / "own_ops.json"


def _records() -> dict[str, int]:
    """The recorded choices by GPU and op. Empty without a file or for a damaged one."""
    file = _file()
    with suppress(OSError, ValueError, AttributeError):
        if file is not None:
            return {key: index for key, index in json.loads(file.read_text()).items() if type(index) is int}
    return {}


def checked_configs(configs: Sequence[Config] | None) -> tuple[Config, ...]:
    """Raises TypeError and ValueError unless all configurations have the same names."""
    if configs is None:
        return ({},)
    rule = "configs must be a list of dicts with the same names, such as [{'BLOCK': 128}, {'BLOCK': 256}]"
    if isinstance(configs, str | Mapping) or not all(isinstance(one, Mapping) for one in configs):
        raise TypeError(f"{rule}, got {checks.brief(configs)}")
    if not configs or len({frozenset(one) for one in configs}) > 1:
        raise ValueError(f"{rule}, got {checks.brief(configs)}")
    return tuple(map(dict, configs))
