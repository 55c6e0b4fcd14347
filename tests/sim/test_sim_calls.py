"""Calls of functions that are not inlined, recursion, function pointers, virtual functions and printf."""

import re

import pytest
from sim_cases import ints, iota
from sim_kernels import line_of, simulate

from cukern import sim

TEXT = """
__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
typedef int (*Function)(int);
__device__ int twice(int x) { return 2 * x; }
__device__ int third(int x) { return 3 * x; }
__device__ Function table[2] = {twice, third};
struct Base { __device__ virtual int f(int x) { return x; } };
struct Child : Base { int a; __device__ Child(int a) : a(a) {} __device__ int f(int x) override {
    return x + a; } };
struct Big { int v[5]; float f; };
__device__ __noinline__ Big big(Big b, int i) { b.v[i] += 1; b.f *= 2; return b; }
__device__ __noinline__ void reversed(int* x, int n, int* scratch) {
    scratch[threadIdx.x] = x[n - 1 - threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = scratch[threadIdx.x];
}
"""


def run(body: str, *args, **options) -> None:
    simulate(
        f"{TEXT}__global__ void k(int* out, const int* x, int n) {{ int t = threadIdx.x;\n{body}\n}}",
        *args,
        name="k",
        **options,
    )


def test_recursion_of_diverging_lanes():
    out = ints(64)
    run("out[t] = fib(x[t] % 9); if (t % 3 == 0) out[t] += fib(5);", out, iota(64), 0, block=64)
    fib = [0, 1, 1, 2, 3, 5, 8, 13, 21]
    assert out.tolist() == [fib[t % 9] + 5 * (t % 3 == 0) for t in range(64)]


def test_function_pointers():
    out = ints(64)
    run("out[t] = table[x[t] % 2](t);", out, iota(64), 0, block=64)
    assert out.tolist() == [t * (2 + t % 2) for t in range(64)]


def test_virtual_functions():
    out = ints(64)
    run(
        "Base b; Child c(n); Base* p = x[t] % 3 ? &b : (Base*)&c; out[t] = p->f(t);",
        out,
        iota(64),
        100,
        block=64,
    )
    assert out.tolist() == [t + 100 * (t % 3 == 0) for t in range(64)]


def test_structs_as_arguments_and_results():
    out = ints(64)
    run(
        "Big g = {{1, 2, 3, 4, 5}, 1.5f}; g = big(g, x[t] % 5); out[t] = g.v[t % 5] * 10 + g.v[(t + 1) % 5] "
        "+ (int)g.f;",
        out,
        iota(64),
        0,
        block=64,
    )
    assert out.tolist() == [(t % 5 + 2) * 10 + (t + 1) % 5 + 1 + 3 for t in range(64)]


def test_barrier_in_a_function():
    out = iota(64)
    run("__shared__ int scratch[64]; reversed(out, n, scratch);", out, iota(64), 64, block=64)
    assert out.tolist() == iota(64).flip(0).tolist()


def test_fault_in_a_function_names_its_line():
    text = """
__device__ __noinline__ int at(const int* x, int i) {
    return x[i];  // here
}
__global__ void k(int* out, const int* x) { out[threadIdx.x] = at(x, threadIdx.x + 1); }
"""
    with pytest.raises(
        sim.OutOfBounds,
        match=rf"thread \(63, 0, 0\), <cukern.compile \w+>:{line_of(text, 'here')}: reads 4 bytes",
    ):
        simulate(text, ints(64), iota(64), block=64, name="k")


def test_call_of_what_is_no_function():
    with pytest.raises(sim.Fault, match="calls the address 0x1040, which is no function"):
        run("Function f = (Function)(size_t)(x[t] + 4160); out[t] = f(t);", ints(64), iota(64), 0, block=64)


def test_unbounded_recursion():
    text = TEXT.replace("n < 2 ? n : fib(n - 1) + fib(n - 2)", "n < -9999 ? n : fib(n - 1) * fib(n - 2) + n")
    with pytest.raises(sim.NotSimulated, match="calls nested more than 200 deep"):
        simulate(
            f"{text}__global__ void k(int* out) {{ out[threadIdx.x] = fib(threadIdx.x); }}",
            ints(32),
            name="k",
        )


def test_call_that_is_not_simulated():
    with pytest.raises(sim.NotSimulated, match=r"call of malloc, in k, <cukern.compile \w+>:"):
        run("int* p = (int*)malloc(4 * n); p[0] = x[t]; out[t] = p[n - 1];", ints(32), iota(32), 4)


def test_printf(capsys):
    run(
        r"""if (t % 20 == 3) printf("t %d x %5.2f|%-4s|%c %% %u %llx %05d\n", t,
                                  0.5f * x[t], "ab", 'z', 4000000000u, 1ull << 40, t);
        if (t == 5 && blockIdx.x == 1) printf("last");""",
        ints(64), iota(64), 0, block=32, grid=2,
    )  # fmt: skip
    lines = [
        f"k, block ({b}, 0, 0), thread ({t}, 0, 0): t {t} x {t / 2:5.2f}|ab  |z % 4000000000 10000000000 "
        f"{t:05}"
        for b in (0, 1)
        for t in (3, 23)
    ]
    assert capsys.readouterr().out.splitlines() == [*lines, "k, block (1, 0, 0), thread (5, 0, 0): last"]


def test_printf_of_what_nobody_wrote():
    with pytest.raises(sim.Uninitialized, match=re.escape("uninitialized") + "|that nobody wrote"):
        run('int a[4]; a[x[t] % 2] = 1; printf("%d\\n", a[2 + x[t] % 2]);', ints(32), iota(32), 0)


def test_recursion_with_a_local_array_is_not_simulated():
    text = """
__device__ __noinline__ int f(int n, const int* x) {
    int a[4];
    for (int i = 0; i < 4; ++i) a[x[i] & 3] = x[i] + n;
    return n > 0 ? 3 * f(n - 1, x) + f(n - 2, x) + a[x[n] & 3] : 0;
}
__global__ void k(int* out, const int* x) { out[threadIdx.x] = f(threadIdx.x % 4, x); }
"""
    with pytest.raises(sim.NotSimulated, match="recursion of a function with a local array, in k"):
        simulate(text, ints(32), iota(32), name="k")
