"""GPT-2's weights at Hugging Face: a folder with model.safetensors and config.json."""

import json
from pathlib import Path

import torch
from torch import Tensor

from cukern.gpt2.checkpoint import DTYPES, PARAMETERS, Config, Parameters, checked
from cukern.gpt2.files import PathLike, expect, optional, replace

HF_SIZES = {
    "n_positions": "max_seq_len",
    "vocab_size": "vocab_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_embd": "channels",
}
HF_FIXED = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}  # what else changes the result
HF_FIXED |= {
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}


def _hf_views(config: Config, parameters: Parameters) -> dict[str, Tensor]:
    """Views of parameters with Hugging Face's names and shapes: one per layer, without padding; weights of
    Conv1D are (in, out)."""
    views: dict[str, Tensor] = {}
    for name, (_, hf_name) in PARAMETERS.items():
        tensor = parameters[name][: config.vocab_size] if name == "wte" else parameters[name]
        tensor = tensor.mT if tensor.ndim == 3 else tensor
        views |= {hf_name.format(i): layer for i, layer in enumerate(tensor if "{}" in hf_name else [tensor])}
    return views


def write_hugging_face(folder: PathLike, config: Config, parameters: Parameters) -> None:
    """Write model.safetensors and config.json, which transformers.GPT2LMHeadModel.from_pretrained reads."""
    library = optional("safetensors", "safetensors.torch", "Hugging Face's weights need")
    dtype = checked(config, parameters, "parameter", tuple(DTYPES.values()))[0].dtype
    tensors = {
        f"transformer.{name}": view.detach().cpu().contiguous()
        for name, view in _hf_views(config, parameters).items()
    }
    entries = HF_FIXED | {theirs: getattr(config, ours) for theirs, ours in HF_SIZES.items()}
    names = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    with replace(Path(folder, "model.safetensors")) as file:
        file.write(library.save(tensors, metadata={"format": "pt"}))
    with replace(Path(folder, "config.json")) as file:
        file.write(json.dumps(names | entries, indent=2).encode())


def read_hugging_face(folder: PathLike) -> tuple[Config, dict[str, Tensor]]:
    """Read a GPT-2 of any size in its own dtype, e.g. a clone of huggingface.co/openai-community/gpt2. wte is
    padded with zeros."""
    library = optional("safetensors", "safetensors.torch", "Hugging Face's weights need")
    try:
        entries = json.loads((path := Path(folder, "config.json")).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: expected JSON; {error}") from None
    expect(
        entries.get("model_type", "gpt2") == "gpt2",
        "model_type 'gpt2'",
        repr(entries.get("model_type")),
        path,
    )
    for key, value in HF_FIXED.items():
        expect(entries.get(key, value) == value, f"{key} = {value!r}", repr(entries.get(key)), path)
    expect(entries.keys() >= HF_SIZES.keys(), f"entries {', '.join(HF_SIZES)}", ", ".join(entries), path)
    config = Config(**{ours: entries[theirs] for theirs, ours in HF_SIZES.items()})
    path = Path(folder, "model.safetensors")
    masks = ".attn.bias", ".attn.masked_bias"  # the causal masks
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        loaded = library.load_file(path)
    except optional("safetensors", "safetensors", "Hugging Face's weights need").SafetensorError as error:
        raise ValueError(f"{path}: expected safetensors; {error}") from None
    tensors = {name.removeprefix("transformer."): x for name, x in loaded.items() if not name.endswith(masks)}
    head = tensors.pop("lm_head.weight", None)
    dtype = tensors["wte.weight"].dtype if "wte.weight" in tensors else torch.float32
    parameters = {
        name: torch.zeros(shape, dtype=dtype, device="cpu") for name, shape in config.shapes.items()
    }
    views = _hf_views(config, parameters)
    for name in {**views, **tensors}:
        expected, found = (
            (tuple(x[name].shape), x[name].dtype) if name in x else None for x in (views, tensors)
        )
        expect(expected == found, f"{name}: {expected}", found, path)
        views[name].copy_(tensors[name])
    expect(
        head is None or torch.equal(head, views["wte.weight"]),
        "lm_head.weight equal to wte.weight",
        "other values",
        path,
    )
    return config, parameters
