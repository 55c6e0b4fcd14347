"""cukern.patch_lycoris: LoKr modules of LyCORIS and PEFT with cukern.lokr_linear, in place."""

import importlib.metadata
import re
import sys
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from cukern.integrations.attention import _warn
from cukern.integrations.transformers import Patch
from cukern.ops.kron_linear import lokr_linear
from cukern.runtime import checks
from cukern.runtime.dispatch import autocast

Modules = dict[str, tuple[Any, str | None]]  # by name, with the reason why one keeps its own forward
# The methods that are replaced are private: only tested releases
RELEASES = {"lycoris-lora": ((4, 1, 3), (4, 2)), "peft": ((0, 21), (0, 22))}


def patch_lycoris(network: nn.Module) -> Patch:
    """Let the LoKr modules of LyCORIS or PEFT use `cukern.lokr_linear`, in place, so that W1 (x) W2 is never
    formed. Parameters, state dict and results do not change, up to rounding.

        from lycoris import create_lycoris
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
        network = create_lycoris(model, algo="lokr", linear_dim=4, linear_alpha=2, factor=8)
        network.apply_to()
        record = cukern.patch_lycoris(network)
        print(record)
        record.undo()

    Args:
        network: a LycorisNetwork, or any module that contains LokrModules, before or after `apply_to`; or a
            model of PEFT with LoKr layers.

    Adapters of Linear and Conv2d are replaced, with w1 and w2 full or low-rank; Conv2d by unfold if it is not
    1 x 1. A base layer runs as before, and the adapter is added to its output. `multiplier`, `scalar`, bypass
    mode, dropout and module dropout work as in LyCORIS; merging uses its own code. A module takes its own
    forward, with one warning, if the multiplier is a tensor, and in training with rank dropout, which bypass
    mode does not have. An adapter of a convolution ignores padding_mode, as in LyCORIS. Of PEFT, Linear
    layers are replaced.

    Returns a `Patch`: str() lists what was replaced, and what was not and why; `undo()` restores the network.

    Raises TypeError for anything but a torch.nn.Module; ValueError for a network without LoKr modules, one
    that is patched already, and an untested version of LyCORIS or PEFT.
    """
    if not isinstance(network, nn.Module):
        rule = "network must be a LycorisNetwork, or a module with LokrModules"
        raise TypeError(f"{rule}, got {checks.brief(network)}")
    if layers := _peft_layers(network):
        return _patched(network, layers, "PEFT", {"_get_delta_activations": _peft_activations})
    _check_version("lycoris-lora")
    from lycoris.modules.base import LycorisBaseModule
    from lycoris.modules.lokr import LokrModule

    found = {m.lora_name: m for m in getattr(network, "loras", [])}  # submodules only after apply_to
    found |= {n: m for n, m in network.named_modules() if isinstance(m, LycorisBaseModule)}
    if not any(isinstance(m, LokrModule) for m in found.values()):
        kinds = ", ".join(sorted({type(m).__name__ for m in found.values()})) or "no module of LyCORIS"
        raise ValueError(f"{type(network).__name__} has no LokrModule: it has {kinds}")
    reasons = {n: (m, _reason(m, LokrModule)) for n, m in found.items()}
    forwards = {"_rebuild_forward": _rebuild_forward, "bypass_forward": _bypass_forward}
    return _patched(network, reasons, "LyCORIS", forwards)


def _patched(
    network: nn.Module, modules: Modules, what: str, methods: dict[str, Callable[..., Any]]
) -> Patch:
    """The network with other `methods` of its modules."""
    if any("_cukern_patched" in vars(m) for m, _ in modules.values()):
        raise ValueError(f"{type(network).__name__} is patched already: call undo() of its record first")
    record = Patch(f"{type(network).__name__} ({len(modules)} modules of {what})")
    try:
        _patch_modules(record, modules, methods)
    except BaseException:
        record.undo()
        raise
    return record


def _check_version(package: str) -> None:
    found, (oldest, before) = importlib.metadata.version(package), RELEASES[package]
    if not oldest <= tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < before:
        first, last = (".".join(map(str, release)) for release in (oldest, before))
        raise ValueError(
            f"cukern.patch_lycoris supports {package} from {first} to before {last}, got {found}"
        )


def _patch_modules(record: Patch, modules: Modules, methods: dict[str, Callable[..., Any]]) -> None:
    counts: Counter[str] = Counter()
    for name, (module, reason) in modules.items():
        if reason is not None:
            record.kept[name or type(module).__name__] = reason
            continue
        record.set(module, "_cukern_patched", True)
        for method, function in methods.items():
            record.set(module, method, MethodType(function, module))
        # LyCORIS keeps the layer in a list
        layer = module.org_module[0] if hasattr(module, "org_module") else module.get_base_layer()
        counts[type(layer).__name__] += 1
    record.replaced.update({kind: f"{n} of LoKr: lokr_linear" for kind, n in counts.items()})


def _reason(module: Any, lokr: Any) -> str | None:
    """Why the module keeps its own forward, or None."""
    if type(module) is not lokr:
        return f"{type(module).__name__} is not LoKr"
    layer = module.org_module[0]
    conv = module.module_type == "conv2d"
    reasons = {
        "its forward was replaced, or it is a parametrization": "forward" in vars(module),
        f"there is no op for {module.module_type}": module.module_type not in ("linear", "conv2d"),
        "weight decomposition needs the whole weight": module.wd,
        "w2 has the Tucker form": module.tucker and not module.use_w2,
        "the scalar is neither a parameter nor 1": _scalar(module) is None and module.scalar.item() != 1,
        "a convolution with groups": conv and layer.groups != 1,
        "the padding of a convolution is a string": conv and isinstance(layer.padding, str),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _scalar(module: Any) -> Tensor | None:
    """The trained scalar. The buffer of modules without one is always 1."""
    return module.scalar if isinstance(module.scalar, nn.Parameter) else None


# ---- PEFT


def _peft_layers(network: nn.Module) -> Modules:
    if "peft" not in sys.modules:  # who has such a layer has imported it
        return {}
    from peft.tuners.lokr import layer

    found = {n: m for n, m in network.named_modules() if isinstance(m, layer.LoKrLayer)}
    if found:
        _check_version("peft")
    return {
        n: (m, None if type(m) is layer.Linear else f"there is no op for {type(m).__name__}")
        for n, m in found.items()
    }


def _peft_activations(self: Any, adapter: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if self.training and self.rank_dropout[adapter]:
        _warn("a LoKr layer of PEFT with rank dropout takes its own forward")
        return type(self)._get_delta_activations(self, adapter, x, *args, **kwargs)
    w1, w2 = (_peft_factor(self, name, adapter) for name in ("lokr_w1", "lokr_w2"))
    first = w1[0] if isinstance(w1, tuple) else w1
    x = self._cast_input_dtype(x, first.dtype)
    return lokr_linear(x, w1, w2, scale=float(self.scaling[adapter]))


def _peft_factor(self: Any, name: str, adapter: str) -> Tensor | tuple[Tensor, ...]:
    """A factor, or the pair of a low-rank one."""
    whole = getattr(self, name)
    if adapter in whole:
        return whole[adapter]
    return tuple([getattr(self, f"{name}_{part}")[adapter] for part in "ab"])


# ---- the forwards


def _rebuild_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if (self.training and self.rank_dropout) or isinstance(self.multiplier, Tensor):
        _warn("a LoKr module with rank dropout or a tensor as multiplier takes its own forward")
        return type(self)._rebuild_forward(self, x, *args, **kwargs)
    return _add_adapter(self, x, self.org_forward(x, *args, **kwargs), self.multiplier)


def _bypass_forward(self: Any, x: Tensor, scale: float = 1) -> Tensor:
    if isinstance(scale, Tensor):
        _warn("a LoKr module with rank dropout or a tensor as multiplier takes its own forward")
        return type(self).bypass_forward(self, x, scale)
    return _add_adapter(self, x, self.org_forward(x), scale, self.drop)


def _add_adapter(
    self: Any, x: Tensor, base: Tensor, multiplier: float, drop: nn.Module | None = None
) -> Tensor:
    """base + multiplier * scale * scalar * x (w1 (x) w2).T, with dropout of the second term."""
    w1, w2 = _factor(self, x, "w1"), _factor(self, x, "w2")
    scale, scalar, conv = float(self.scale * multiplier), _scalar(self), self.module_type == "conv2d"
    alike = base.dtype == x.dtype or autocast.enabled(x)
    if alike and not conv and scalar is None and (drop is None or isinstance(drop, nn.Identity)):
        return lokr_linear(x, w1, w2, scale=scale, residual=base)
    y = lokr_linear(_columns(self, x) if conv else x, w1, w2, scale=scale)
    y = y.mT.reshape(base.shape) if conv else y
    y = y if scalar is None else y * scalar.to(y)
    return base + (y if drop is None else drop(y.contiguous()))  # as in LyCORIS, for the same mask


def _factor(self: Any, x: Tensor, name: str) -> Tensor | tuple[Tensor, ...]:
    """w1 or w2, or the pair of a low-rank one, as matrices on x's device and in its dtype."""
    if getattr(self, f"use_{name}"):
        return getattr(self, f"lokr_{name}").flatten(1).to(x)
    return tuple([getattr(self, f"lokr_{name}_{part}").to(x) for part in "ab"])


def _columns(self: Any, x: Tensor) -> Tensor:
    """The inputs of each element of a convolution's output: (batch, elements, channels * kernel size)."""
    layer = self.org_module[0]
    if (*layer.kernel_size, *layer.stride, *layer.padding) == (1, 1, 1, 1, 0, 0):
        return x.flatten(-2).mT
    steps = {name: getattr(layer, name) for name in ("dilation", "padding", "stride")}
    return F.unfold(x, layer.kernel_size, **steps).mT
