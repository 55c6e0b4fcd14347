"""Graphs hold for all sizes: torch.compile and torch.export with every dimension dynamic, on CPU tensors and
by kernels.

A graph is made for the first of three sizes and runs for the others: compiled graphs for the second, exported
ones for both. Compiling again is an error.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers import OLD_TORCH, functions
from torch import nn
from torch._dynamo import config, mark_dynamic
from torch.export import Dim, export

import cukern
from cukern.gpt2.checkpoint import Config
from cukern.gpt2.model import GPT2
from cukern.runtime import registry

pytestmark = pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs

# The sizes of the registry's ops, by their `dims`.
SIZES = {
    "ROWS COLUMNS": ((5, 67), (7, 128), (3, 30)),
    "MATRICES T": ((2, 19), (3, 24), (5, 13)),
    "MATRICES T D": ((4, 19, 16), (2, 24, 8), (3, 13, 24)),
    "TOKENS SEQUENCES HEADS D": ((9, 4, 2, 16), (12, 3, 3, 8), (5, 2, 4, 24)),
    "ROWS CLASSES COLUMNS": ((5, 67, 8), (9, 300, 16), (7, 30, 24)),
    "BATCH TIME VOCABULARY FEATURES": ((2, 5, 7, 3), (3, 67, 11, 24), (4, 24, 30, 8)),
    "ROWS F1 F2...": ((5, 3, 9, 2), (7, 2, 4, 5), (4, 3, 9, 2)),
    "ROWS P1 Q1 P2 Q2...": ((6, 2, 5, 8, 3), (5, 4, 7, 2, 6), (7, 2, 5, 8, 3)),
    "M N K": ((3, 33, 80), (70, 20, 50), (16, 24, 32)),
    "B S H D": ((2, 5, 3, 32), (3, 7, 4, 16), (6, 9, 2, 24)),
    "B S H K D": ((2, 5, 4, 3, 32), (3, 7, 6, 2, 16), (6, 9, 8, 4, 24)),
    "TOKENS SEQUENCES H D": ((9, 4, 2, 16), (19, 3, 4, 32), (30, 5, 3, 24)),
    "S B H D": ((5, 2, 3, 32), (7, 3, 4, 16), (9, 5, 2, 24)),
    "SHAPE...": ((3, 5, 7), (4, 6, 8), (9, 2, 3)),
}

# The dimensions that do not change, as (input, dimension). CASES below varies those that only the registry's
# inputs hold fixed.
STATIC = {
    # the registry has one sequence, "packed, more" several; queries, keys and values are three
    "attention_packed": {(0, 0), (0, 2)},
    "packed, more": {(0, 2)},
    "rope_te": {(1, 1), (1, 2)},  # 1 by definition
}


class Case(NamedTuple):
    """A function, its inputs for each of three sizes, and how many of these, the first ones, have a
    gradient."""

    call: Callable[..., Any]
    make: Callable[..., tuple[torch.Tensor, ...]]
    sizes: tuple[tuple[int, ...], ...]
    gradients: int


def of_registry(name, dtype):
    """The Case of a registered one. Inputs that it writes are copied first."""
    one = registry.CASES[name]

    def call(*inputs):
        return one.call(
            *(x.clone() if n in one.in_place else x for n, x in zip(one.names(inputs), inputs, strict=True))
        )

    inputs = one.make(SIZES[one.dims][0], dtype, "cpu")
    gradients = sum(one.has_gradient(n, x) for n, x in zip(one.names(inputs), inputs, strict=True))
    return Case(call, lambda *dims: one.make(dims, dtype, "cpu"), SIZES[one.dims], gradients)


def normal(*shapes, dtype=torch.float32):
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def qkv(batch, heads, kv_heads, queries, keys, d):
    return normal(
        (batch, heads, queries, d),
        (batch, kv_heads, keys, d),
        (batch, kv_heads, keys, d),
        dtype=torch.bfloat16,
    )


def packed(batch, time, heads, d):
    return normal((batch, time, 3, heads, d), dtype=torch.bfloat16)


def with_lengths(*sizes):
    return *qkv(*sizes), torch.randint(1, sizes[4], sizes[:1], dtype=torch.int32)


def tokens(batch, time, vocabulary, features, rows):
    return *normal((vocabulary, features), (rows, features)), torch.randint(vocabulary, (batch, time))


def heads(batch, time, h, k, d, positions):
    x, y = normal((batch, time, h, d), (batch, time, k, d))
    return x, y, *cukern.rope_tables(positions, d), torch.randint(positions, (batch, time))


def factors(rows, time, a, b, c, d):
    return normal((rows, time, a * c), (a, b), (c, d), (b * d,))


def adamw(*tensors):
    params, grads, exp_avgs, exp_avg_sqs = ([x.clone() for x in tensors[2 * i : 2 * i + 2]] for i in range(4))
    cukern.adamw(params, grads, exp_avgs, exp_avg_sqs)
    return *params, *exp_avgs, *exp_avg_sqs


# grouped or not, more queries or more keys
HEADS = ((2, 4, 2, 5, 7, 16), (3, 3, 3, 9, 8, 8), (4, 8, 4, 6, 6, 24))
FEW_QUERIES = ((2, 4, 2, 3, 17, 16), (3, 3, 3, 9, 20, 8), (4, 8, 4, 2, 33, 24))
MATRIX = ((5, 3, 9, 50), (7, 8, 14, 80), (9, 2, 47, 33))
# the table is as long as the sequence, or longer
POSITIONS = ((2, 5, 4, 3, 32, 11), (3, 7, 6, 2, 16, 7), (6, 9, 8, 5, 24, 40))
# of positions: longer than the time, or as long
TABLES = ((2, 5, 7, 3, 9), (3, 12, 11, 8, 12), (4, 19, 30, 13, 24))
FACTORS = ((5, 4, 3, 9, 2, 7), (7, 2, 8, 4, 5, 3), (9, 5, 3, 9, 2, 7))
# multiples of 8 or not, which decides the layout of a 16-bit gradient
ALIGNED = ((5, 3, 16, 50), (7, 2, 15, 80), (9, 4, 47, 33))
CASES = {
    "grouped": Case(lambda *x: cukern.attention(*x), qkv, HEADS, 3),
    "full": Case(lambda *x: cukern.attention(*x, causal=False, return_lse=True), qkv, HEADS, 0),
    "window": Case(lambda *x: cukern.attention(*x, window=5), qkv, HEADS, 0),
    "key_lengths": Case(lambda q, k, v, n: cukern.attention(q, k, v, key_lengths=n), with_lengths, HEADS, 3),
    "decode": Case(lambda q, k, v, n: cukern.attention(q, k, v, key_lengths=n), with_lengths, FEW_QUERIES, 0),
    "packed": Case(cukern.attention_packed, packed, ((2, 7, 4, 16), (3, 9, 5, 8), (4, 6, 2, 24)), 1),
    "embedding": Case(lambda w, p, t: cukern.embedding(t, w, p), tokens, TABLES, 2),
    "rope": Case(lambda q, k, c, s, i: cukern.rope(q, c, s, k=k), heads, POSITIONS, 2),
    "rope_positions": Case(lambda q, k, c, s, i: cukern.rope(q, c, s, k=k, position_ids=i), heads, POSITIONS,
                           2),
    "rope_tables": Case(
        lambda x: cukern.rope(x, *cukern.rope_tables(x.shape[1], x.shape[3])), lambda *s: heads(*s)[:1],
        POSITIONS, 1
    ),
    "kron_linear": Case(lambda x, a, b, bias: cukern.kron_linear(x, (a, b), bias=bias), factors, FACTORS, 4),
    "linear": Case(
        lambda *x: cukern.linear(*(t.bfloat16() for t in x)),
        lambda r, t, k, n: normal((r, t, k), (n, k), (n,)), ALIGNED, 3
    ),
    "cross_entropy": Case(
        lambda x, t: cukern.cross_entropy(x, t, reduction="none", label_smoothing=0.1),
        lambda r, t, _, n: (torch.randn(r, t, n), torch.randint(n, (r, t))), MATRIX, 1,
    ),
    "linear_cross_entropy": Case(
        lambda *x: cukern.linear_cross_entropy(*x),
        lambda r, t, c, n: (*normal((r, t, c), (n, c)), torch.randint(n, (r, t))), MATRIX, 2,
    ),
    "softmax": Case(lambda x: cukern.softmax(x, 1), lambda *s: normal(s[:3]), MATRIX, 1),
    "causal_softmax": Case(
        lambda x, sink: cukern.causal_softmax(x, scale=0.5, window=3, sink=sink),
        lambda *s: normal(s, s[1:2]), MATRIX, 2
    ),
    "adamw": Case(
        adamw, lambda a, b, c: tuple(torch.rand(s) for _ in range(4) for s in ((a, b), (c,))),
        ((3, 5, 7), (4, 9, 130), (10, 3, 8)), 0
    ),
}  # fmt: skip


class Llama(nn.Module):
    """One layer of a model with rope, grouped heads, gated and Kronecker layers, and the loss."""

    def __init__(self):
        super().__init__()
        shapes = {
            "table": (33, 32),
            "qkv": (64, 32),
            "out": (32, 32),
            "up": (80, 32),
            "down": (32, 40),
            "a": (8, 8),
            "b": (4, 4),
        }
        norms = {f"norm{i}": (32,) for i in range(3)}
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(s) / 6) for name, s in {**shapes, **norms}.items()}
        )
        self.cos, self.sin = cukern.rope_tables(64, 8)

    def forward(self, tokens, targets):
        w = self.weights
        x = cukern.embedding(tokens, w.table)
        qkv = cukern.linear(cukern.rmsnorm(x, w.norm0), w.qkv).unflatten(-1, (-1, 8))
        q, k, v = qkv.split([4, 2, 2], 2)
        q, k = cukern.rope(q, self.cos, self.sin, k=k)
        y = cukern.attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).flatten(2)
        y, x = cukern.rmsnorm(cukern.linear(y, w.out), w.norm1, residual=x)
        y = cukern.linear(cukern.swiglu(*cukern.linear(y, w.up).chunk(2, -1)), w.down)
        y, _ = cukern.rmsnorm(cukern.kron_linear(y, (w.a, w.b)), w.norm2, residual=x)
        return cukern.linear_cross_entropy(y, w.table, targets)


def gpt2():
    model = GPT2(
        Config(max_seq_len=64, vocab_size=33, padded_vocab_size=64, num_layers=1, num_heads=2, channels=32)
    )
    model.initialize()
    return model


# ---- what is checked of a graph


def outputs(result):
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def inputs_of(case, size):
    return [x.detach().requires_grad_(i < case.gradients) for i, x in enumerate(case.make(*size))]


def static(name, case):
    """The dimensions that have one size, which are those of STATIC."""
    shapes = [[x.shape for x in case.make(*size)] for size in case.sizes]
    found = {
        (i, d)
        for i, one in enumerate(shapes[0])
        for d in range(len(one))
        if len({s[i][d] for s in shapes}) == 1
    }
    assert found == STATIC.get(name, set())
    return found


def agrees(call, graph, inputs, wanted):
    """The values of a call, and its gradients for `wanted`, are those of the graph."""
    want, got = outputs(call(*inputs)), outputs(graph(*inputs))
    torch.testing.assert_close(got, want)
    differentiable = [i for i, out in enumerate(want) if out.requires_grad]
    if wanted and differentiable:
        douts = [torch.randn_like(want[i]) for i in differentiable]
        found = [
            torch.autograd.grad([outs[i] for i in differentiable], wanted, douts) for outs in (got, want)
        ]
        torch.testing.assert_close(*found)


@pytest.fixture(autouse=True)
def one_graph():
    torch._dynamo.reset()
    logging.getLogger("torch._guards").setLevel(logging.CRITICAL)
    with config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def path(request):
    """torch's operations for CPU tensors, or the kernels in the simulator."""
    with cukern.backend({"torch": "gpu", "sim": "sim"}[request.param]):
        yield request.param


# One case of the registry for each function. That of adamw has views of one tensor, and torch's
# functionalization of writes to such views takes their sizes as constants; CASES has separate tensors.
ROWS = [name for name in functions().values() if name != "adamw"]
MORE = [f"{name}, more" for name in CASES]
# elsewhere as the ops' rows
TORCH = [*(name for name in ROWS if not name.startswith("rope_")), "key_lengths, more", "adamw, more"]
every_case = pytest.mark.parametrize(
    "named, path",
    [
        *(
            (name, "sim")
            for name in (*ROWS, *(f"{name}, more" for name, case in CASES.items() if case.gradients))
        ),
        *((name, "torch") for name in TORCH),
    ],
    indirect=["path"],
)
both_paths = pytest.mark.parametrize("path", ["sim", "torch"], indirect=True)


def case_of(named):
    """A case, and its static dimensions. The kernels of attention compile faster for 16 bits."""
    name = named.removesuffix(", more")
    dtype = torch.bfloat16 if named.startswith("attention") else torch.float32
    case = of_registry(name, dtype) if name == named else CASES[name]
    return case, static(named, case)


@every_case
def test_every_dimension_marked(named, path):
    case, fixed = case_of(named)
    compiled = torch.compile(case.call, backend="aot_eager", fullgraph=True)
    for size in case.sizes[:2]:  # the third is for the exported graphs
        inputs = inputs_of(case, size)
        for i, x in enumerate(inputs):
            for d in set(range(x.ndim)) - {d for j, d in fixed if j == i}:
                mark_dynamic(x, d)
        agrees(case.call, compiled, inputs, inputs[: case.gradients])


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.11 exports some ops with guards on sizes")
# torch's operations are those of the test above, and of the models below
@pytest.mark.parametrize("path", ["sim"], indirect=True)
@pytest.mark.parametrize("named", [*ROWS, *MORE])
def test_exported_with_every_dimension_dynamic(named, path):
    case, fixed = case_of(named)

    class Module(nn.Module):
        def forward(self, *inputs):
            return case.call(*inputs)

    first = case.make(*case.sizes[0])
    dims = tuple(
        {d: None if (i, d) in fixed else Dim.DYNAMIC for d in range(x.ndim)} for i, x in enumerate(first)
    )
    exported = export(Module(), first, dynamic_shapes=(dims,)).module()
    for size in case.sizes:
        agrees(case.call, exported, case.make(*size), ())


# ---- models: batch and time are dynamic


BATCH, TIME = Dim("BATCH", min=2, max=64), Dim("TIME", min=2, max=64)
MODELS = {"llama": Llama, "gpt2": gpt2}


def text(batch, time):
    return torch.randint(33, (batch, time)), torch.randint(33, (batch, time))


@pytest.mark.parametrize("path", ["sim"], indirect=True)
def test_model_compiled_with_a_dynamic_batch_and_time(path):
    model = Llama()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for size in ((2, 7), (3, 12), (4, 5)):
        inputs = text(*size)
        for x in inputs:
            mark_dynamic(x, 0)
            mark_dynamic(x, 1)
        agrees(model, compiled, inputs, list(model.parameters()))


@both_paths
@pytest.mark.parametrize("name", MODELS)
def test_model_exported_with_a_dynamic_batch_and_time(name, path):
    if OLD_TORCH and path == "torch":
        pytest.skip("torch 2.11 adds guards to a graph when it compares strides")
    model = MODELS[name]()
    exported = export(model, text(2, 7), dynamic_shapes=({0: BATCH, 1: TIME},) * 2).module()
    for size in ((2, 7), (3, 12), (4, 5)):
        agrees(model, exported, text(*size), ())
