"""cukern.patch: transformers' models with cukern's ops, in place."""

import functools
import importlib
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from cukern.integrations import attention, modules
from cukern.ops.cross_entropy import linear_cross_entropy
from cukern.runtime import checks

OLDEST = (5, 17)  # the oldest tested version
CACHE = ("cache", "past_key_values")  # the models' argument: 5.17 knows the second name only, 5.24 both
_SILU, _TANH, _ERF = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new"), ("gelu", "gelu_python")
_GATED = {
    **dict.fromkeys(_SILU, modules.swiglu_mlp),
    **dict.fromkeys(_TANH, modules.geglu_tanh_mlp),
    **dict.fromkeys(_ERF, modules.geglu_mlp),
}
_PACKED = dict.fromkeys(_SILU, modules.packed_swiglu_mlp)


class Family(NamedTuple):
    """What `patch` replaces in the models of one config.model_type. A str gives the reason why a part is not
    replaced."""

    prefix: str  # of the class names
    norm: Callable[..., Tensor] = modules.rms_norm
    mlp: dict[str, Callable[..., Tensor]] | str = _GATED  # by the name of the activation
    activation: str = "hidden_act"  # the attribute of the config
    rope: Callable[..., Any] | str = modules.rotary
    file: str = ""  # the folder of the model, if it is not its model_type
    norm_class: str = ""
    output: str = "CausalLMOutputWithPast"


_EXPERTS = "the experts use a clamped SwiGLU, for which there is no op"
FAMILIES = {
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2"),
    "qwen3": Family("Qwen3"),
    "mistral": Family("Mistral"),
    "gemma2": Family("Gemma2", modules.gemma_norm, activation="hidden_activation"),
    "gemma3_text": Family("Gemma3", modules.gemma_norm, activation="hidden_activation", file="gemma3"),
    "phi3": Family("Phi3", mlp=_PACKED),
    "gpt_oss": Family("GptOss", mlp=_EXPERTS, rope=modules.rotary_of_pairs,
                      output="MoeCausalLMOutputWithPast"),
    "gpt2": Family(
        "GPT2", modules.layer_norm, dict.fromkeys(_TANH, modules.gelu_tanh_mlp), "activation_function",
        "GPT-2 has learned positions",
        norm_class="LayerNorm", output="CausalLMOutputWithCrossAttentions",
    ),
    "olmo2": Family("Olmo2"),
}  # fmt: skip
_MISSING = object()
_rope_users: dict[str, int] = {}  # the number of patched models by the file of their family


class Patch:
    """What `patch` did. str() lists the replaced parts, and the others with the reason. `undo()` restores
    every attribute."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.replaced: dict[str, str] = {}
        self.kept: dict[str, str] = {}
        self._undo: list[Callable[[], Any]] = []

    def __str__(self) -> str:
        lines = [f"  {part:<10} {text}" for part, text in self.replaced.items()]
        lines += [f"  {part:<10} not replaced: {text}" for part, text in self.kept.items()]
        return "\n".join((f"cukern.patch: {self.name}", *lines))

    __repr__ = __str__

    def undo(self) -> None:
        """Restore the model. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of the object's own, until `undo`."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        restore = (
            functools.partial(delattr, owner, name)
            if before is _MISSING
            else functools.partial(setattr, owner, name, before)
        )
        self._undo.append(restore)


def patch(
    model_or_type: Any,
    *,
    attention: bool = True,
    norms: bool = True,
    mlp: bool = True,
    rope: bool = True,
    loss: bool = True,
) -> Patch:
    """Let a causal language model of transformers use cukern's ops, in place. Parameters and state dict do
    not change.

        from transformers import LlamaConfig, LlamaForCausalLM
        sizes = dict(vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
        record = cukern.patch(model)
        print(record)
        record.undo()

    Args:
        model_or_type: a model for causal language modelling with config.model_type llama, qwen2, qwen3,
            mistral, gemma2, gemma3_text, phi3, gpt_oss, gpt2 or olmo2; a module that contains one, such as a
            PEFT model; or its type, such as transformers.LlamaForCausalLM, whose later instances are patched
            when they are built.
        attention: `attn_implementation="cukern"`. What it does not support takes the model's own attention,
            with one warning.
        norms: RMSNorm and LayerNorm. mlp: the activation and its product between the linear layers.
        rope: apply_rotary_pos_emb of the model's file, for all models of the family, until the last one is
            restored.
        loss: in training, with labels and without `return_logits=True`, the loss comes from
            `linear_cross_entropy`, and `outputs.logits` is None.

    Patch a model before torch.compile, DDP, FSDP or accelerate wrap it. Whole models cannot be pickled while
    they are patched; their state dict can. docs/guide/transformers.md has the details.

    Returns a `Patch`: str() lists what was replaced, and what not and why; `undo()` restores the model, or
    ends the patching of new instances.

    Raises TypeError for anything but a model or a type of one, and for a flag that is not a bool; ValueError
    for another family, a model that is patched already, here or by another library, one on several devices,
    and an unsupported transformers.
    """
    flags = {"attention": attention, "norms": norms, "mlp": mlp, "rope": rope, "loss": loss}
    for name, value in flags.items():
        checks.flag(name, value)
    from transformers import PreTrainedModel

    _check_version()
    if isinstance(model_or_type, type):
        if not issubclass(model_or_type, PreTrainedModel):
            raise TypeError(
                f"model_or_type must be a model of transformers or a type of one, got {model_or_type!r}"
            )
        return _patch_type(model_or_type, flags)
    if not isinstance(model_or_type, nn.Module):
        raise TypeError(
            f"model_or_type must be a model of transformers or a type of one, got "
            f"{checks.brief(model_or_type)}"
        )
    model = _causal_model(model_or_type)
    return _patch_model(model, FAMILIES[model.config.model_type], flags)


def _check_version() -> None:
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= version < (6, 0):
        oldest = ".".join(map(str, OLDEST))
        raise ValueError(
            f"cukern.patch supports transformers {oldest} up to 5.x, got {transformers.__version__}"
        )


def _causal_model(model: nn.Module) -> Any:
    """The causal language model in it."""
    from transformers import PreTrainedModel

    found = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    kind = (
        type(model).__name__
        if found is None
        else f"{type(found).__name__} of model_type {found.config.model_type!r}"
    )
    names = [f"{f.prefix}ForCausalLM" for f in FAMILIES.values()] + ["GPT2LMHeadModel"]
    if (
        found is None
        or found.config.model_type not in FAMILIES
        or not any(t.__name__ in names for t in type(found).__mro__)
    ):
        raise ValueError(
            f"cukern.patch knows the models for causal language modelling of {', '.join(FAMILIES)}, got "
            f"{kind}"
        )
    if len(devices := {p.device for p in found.parameters()}) > 1:
        raise ValueError(f"the parameters must be on one device, got {', '.join(sorted(map(str, devices)))}")
    return found


def _patch_type(cls: Any, flags: dict[str, bool]) -> Patch:
    before = cls.__init__
    if hasattr(before, "_cukern"):
        raise ValueError(f"{cls.__name__} is patched already: call undo() of its record first")
    kind = cls.config_class.model_type if cls.config_class else ""
    if kind not in FAMILIES:
        raise ValueError(
            f"cukern.patch knows the models for causal language modelling of {', '.join(FAMILIES)}, got "
            f"{cls.__name__}"
        )

    @functools.wraps(before)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        patch(self, **flags)

    init._cukern = True  # type: ignore[attr-defined]
    record = Patch(f"instances of {cls.__name__} that are built from now on")
    record.set(cls, "__init__", init)
    return record


def _patch_model(model: Any, family: Family, flags: dict[str, bool]) -> Patch:
    record = Patch(f"{type(model).__name__} ({model.config.model_type})")
    norms, mlps = _found(model, family)
    _refuse_patched(model, norms, mlps, family)
    record.kept.update({part: "not asked for" for part, wanted in flags.items() if not wanted})
    parts = {
        "attention": lambda: _patch_attention(record, model),
        "norms": lambda: _patch_forwards(record, "norms", norms, family.norm),
        "mlp": lambda: _patch_mlp(record, model, mlps, family),
        "rope": lambda: _patch_rope(record, model, family),
        "loss": lambda: _patch_loss(record, model, family),
    }
    record.set(model, "_cukern_patched", True)
    try:
        for part, wanted in flags.items():
            if wanted:
                parts[part]()
    except BaseException:
        record.undo()
        raise
    return record


def _found(model: nn.Module, family: Family) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """The norms and MLPs by name. PEFT's adapters of linear layers stay inside of them."""
    named, norm = dict(model.named_modules()), family.norm_class or f"{family.prefix}RMSNorm"
    norms, mlps = (
        {n: m for n, m in named.items() if type(m).__name__ == name} for name in (norm, f"{family.prefix}MLP")
    )
    if not norms or not mlps:
        raise ValueError(
            f"the model has no {norm} or no {family.prefix}MLP: another library has replaced the class, or "
            f"it was quantized"
        )
    return norms, mlps


def _refuse_patched(
    model: Any, norms: dict[str, nn.Module], mlps: dict[str, nn.Module], family: Family
) -> None:
    if "_cukern_patched" in vars(model):
        raise ValueError(f"{type(model).__name__} is patched already: call undo() of its record first")
    for name, module in {"the model": model, "the base model": model.base_model, **norms, **mlps}.items():
        forward = vars(module).get("forward") or type(module).forward
        source = inspect.getmodule(inspect.unwrap(getattr(forward, "__func__", forward)))
        library = source.__name__.partition(".")[0] if source else "unknown code"
        if library not in ("transformers", "torch") or "forward" in vars(module):
            raise ValueError(
                f"the forward of {name} was replaced by {library}: patch the model before other libraries "
                f"do, or only by one"
            )
    function = getattr(_file_of(model, family), "apply_rotary_pos_emb", None)
    if function is not None and not function.__module__.startswith(("transformers.", "cukern.")):
        raise ValueError(
            f"apply_rotary_pos_emb of the model was replaced by {function.__module__.partition('.')[0]}"
        )


def _file_of(model: Any, family: Family) -> Any:
    name = family.file or model.config.model_type
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _patch_forwards(
    record: Patch, part: str, found: dict[str, nn.Module], forward: Callable[..., Tensor]
) -> None:
    for module in found.values():
        chosen = modules.or_own(forward, type(module).forward, modules.tokens_of_module)
        record.set(module, "forward", MethodType(chosen, module))
    record.replaced[part] = f"{len(found)} of {type(next(iter(found.values()))).__name__}: {forward.__name__}"


def _patch_mlp(record: Patch, model: Any, mlps: dict[str, nn.Module], family: Family) -> None:
    activation = getattr(model.config, family.activation)
    if isinstance(family.mlp, str):
        record.kept["mlp"] = family.mlp
    elif activation not in family.mlp:
        record.kept["mlp"] = f"there is no op for the activation {activation!r}"
    else:
        _patch_forwards(record, "mlp", mlps, family.mlp[activation])


def _patch_rope(record: Patch, model: Any, family: Family) -> None:
    if isinstance(family.rope, str):
        record.kept["rope"] = family.rope
        return
    file = _file_of(model, family)
    if not _rope_users.get(file.__name__):
        own = vars(file)["_cukern_before"] = file.apply_rotary_pos_emb
        file.apply_rotary_pos_emb = modules.or_own(family.rope, own, modules.tokens_of_rotary)
    _rope_users[file.__name__] = _rope_users.get(file.__name__, 0) + 1
    record._undo.append(functools.partial(_restore_rope, file))
    record.replaced["rope"] = f"{file.__name__}.apply_rotary_pos_emb"


def _restore_rope(file: Any) -> None:
    _rope_users[file.__name__] -= 1
    if not _rope_users[file.__name__]:
        file.apply_rotary_pos_emb = vars(file).pop("_cukern_before")


# ---- attention


def _patch_attention(record: Patch, model: Any) -> None:
    attention.register()
    before = model.config._attn_implementation
    model.set_attn_implementation(attention.NAME)
    if model.config._attn_implementation != attention.NAME:
        record.kept["attention"] = f"{type(model).__name__} does not allow another attn_implementation"
        return
    record._undo.append(functools.partial(model.set_attn_implementation, before))
    base = model.base_model
    record.set(base, "forward", MethodType(_base_forward(type(base)), base))
    record.replaced["attention"] = f'attn_implementation="{attention.NAME}", was "{before}"'


def _base_forward(cls: Any) -> Callable[..., Any]:
    """The base model's forward. Without mask, positions and cache, it is told that nothing is padded or
    packed, so that it need not read positions on the GPU, nor expect packed sequences under torch.compile."""
    names = _parameters(cls.forward)

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        unpacked = given.get("position_ids") is None or given.get("cu_seq_lens_q") is not None
        fresh = all(given.get(name) is None for name in ("attention_mask", *CACHE))
        if unpacked and fresh and self.config._attn_implementation == attention.NAME:
            tokens = given.get("input_ids")
            tokens = given["inputs_embeds"] if tokens is None else tokens
            given["attention_mask"] = attention.plain(tokens.device)
        return cls.forward(self, **given)

    return forward


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [*inspect.signature(function).parameters][1:]


# ---- loss


def _patch_loss(record: Patch, model: Any, family: Family) -> None:
    if (reason := _no_fused_loss(model)) is not None:
        record.kept["loss"] = reason
        return
    record.set(model, "forward", MethodType(_causal_forward(type(model), family.output), model))
    record.replaced["loss"] = (
        "in training, with labels: linear_cross_entropy; outputs.logits is None unless return_logits=True"
    )


def _no_fused_loss(model: Any) -> str | None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if model.loss_function is not ForCausalLMLoss:
        return (
            f"the model has a loss function of its own, "
            f"{getattr(model.loss_function, '__name__', model.loss_function)}"
        )
    if type(model.get_output_embeddings()) is not nn.Linear:
        return f"the head is a {type(model.get_output_embeddings()).__name__}, not a torch.nn.Linear"
    return None


def _causal_forward(cls: Any, output: str) -> Callable[..., Any]:
    names, result = (
        _parameters(cls.forward),
        getattr(importlib.import_module("transformers.modeling_outputs"), output),
    )

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, return_logits: bool = False, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if return_logits or not self.training or given.get("labels") is None or _wants_logits(self, given):
            return cls.forward(self, **given)
        labels = given.pop("labels")
        given.pop("logits_to_keep", None)
        given.pop("output_router_logits", None)
        given.pop("return_dict", None)
        outputs = self.base_model(**given)
        fields = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        loss = _loss(self, outputs.last_hidden_state, labels, **given)
        return result(loss=loss, **fields)

    return forward


def _wants_logits(model: Any, given: dict[str, Any]) -> bool:
    """True for options that need the logits, or the model's own forward."""
    keep, head, config = given.get("logits_to_keep", 0), model.get_output_embeddings(), model.config
    router = given.get("output_router_logits")
    return (
        isinstance(keep, Tensor)
        or bool(keep)
        or given.get("return_dict", getattr(config, "return_dict", True)) is False
        or bool(getattr(config, "output_router_logits", False) if router is None else router)
        or type(head) is not nn.Linear
        or type(head.weight) not in (Tensor, nn.Parameter)
    )


def _loss(
    model: Any, hidden: Tensor, labels: Tensor, num_items_in_batch: Any = None, ignore_index: int = -100,
    shift_labels: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """transformers' ForCausalLMLoss."""
    head = model.get_output_embeddings()
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    softcap = getattr(model.config, "final_logit_softcapping", None)
    loss = linear_cross_entropy(
        hidden, head.weight, shift_labels.to(hidden.device).view(hidden.shape[:-1]), bias=head.bias,
        ignore_index=ignore_index, reduction="mean" if num_items_in_batch is None else "sum", softcap=softcap,
    )  # fmt: skip
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
