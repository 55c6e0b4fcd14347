"""Small texts in the style of extension code: device code with its value, and host code that must not change
it."""

SPEC = "template <typename T> __device__ float f(T x) { return 1.f; }\n"
TWO = "template <> __device__ float f<float>(float x) { return 2.f; }\n"
ACC = "template <typename T> struct Acc { typedef T type; enum { v = 1 }; };\n"
DEVICE = {  # declarations, the value as an expression, and its value
    "overload behind a macro": (
        "#define HD __host__ __device__ inline\n__device__ float f(float a) { return a / 2; }\nHD int f(int "
        "a) { return a / 2; }\n",
        "f(7)",
        3,
    ),
    "specialization": (SPEC + TWO, "f(1.f)", 2),
    "partial specialization": (
        ACC + "template <typename T> struct Acc<T*> { enum { v = 5 }; };\n",
        "Acc<int*>::v",
        5,
    ),
    "trait of int64_t": (
        "#include <cstdint>\n" + ACC + "template <> struct Acc<std::int64_t> { enum { v = 6 }; };\n",
        "Acc<std::int64_t>::v * 10 + Acc<long long>::v",
        61,
    ),
    "overloads of long": (
        "#include <cstdint>\n__device__ int g(long) { return 1; }\n__device__ int g(long long) { return 2; "
        "}\n",
        "g(std::int64_t(0))",
        1,
    ),
    "size_t overload": (
        "__device__ int g(unsigned int) { return 1; }\n__device__ int g(unsigned long) { return 2; }\n",
        "g(sizeof(int))",
        2,
    ),
    "unmarked function": (
        "static inline int div_up(int a, int b) { return (a + b - 1) / b; }\nconstexpr int sq(int a) { "
        "return a * a; }\n",
        "sq(div_up(7, 2))",
        16,
    ),
    "own namespace at": (
        "namespace at { typedef float Half; inline __device__ float g(Half x) { return x + 1; } }\n",
        "at::g(3)",
        4,
    ),
    "macro with a semicolon": ("#define STEP(x) x += 1; x *= 2\n", "0; float y = 3; STEP(y); out[0] = y", 8),
    "continued define": ("#define BIAS 1 \\\n + 2\n", "2 * BIAS", 4),
    "launch macro": ("#define LAUNCH(k, x) k<<<1, 1>>>(x)\n" + SPEC + TWO, "f(1.f)", 2),
    "default argument": (
        "__device__ float g(float x, float y);\n__device__ float g(float x, float y = 3) { return x * y; }\n",
        "g(2)",
        6,
    ),
    "friend": (
        "namespace n { struct V { float a; friend __device__ float g(V v) { return v.a; } }; }\n",
        "g(n::V{5})",
        5,
    ),
    "constructor": (
        "struct S { float a, b; __device__ S(); };\n__device__ S::S() : a{1}, b(2) { a += b; }\n",
        "S().a",
        3,
    ),
    "conversion": (
        "struct S { float a; __device__ operator float() const; };\n__device__ S::operator float() const { "
        "return a + 1; }\n",
        "S{1}",
        2,
    ),
    "functor": (
        "struct Add { template <typename T> __device__ T operator()(T a, T b) const { return a + b; } };\n"
        "template <typename F> __device__ float twice(F f, float a) { return f(a, a); }\n",
        "twice(Add(), 4.f)",
        8,
    ),
    "if constexpr": (
        "#include <type_traits>\ntemplate <typename T> __device__ float g() { "
        "if constexpr (std::is_same_v<T, float>) return 1;"
        " else if constexpr (std::is_integral<T>::value) return 2; return 3; }\n",
        "g<float>() * 100 + g<long>() * 10 + g<double>()",
        123,
    ),
    "enable_if": (
        "#include <type_traits>\ntemplate <typename T, std::enable_if_t<std::is_floating_point<T>::value, "
        "int> = 0>"
        " __device__ int g(T) { return 1; }\ntemplate <typename T, "
        "std::enable_if_t<std::is_integral<T>::value, int> = 0>"
        " __device__ int g(T) { return 2; }\n",
        "g(1.0) * 10 + g('a')",
        12,
    ),
    "limits": (
        "#include <climits>\n#if ULONG_MAX > 0xffffffffu && CHAR_BIT == 8\n#define N 2\n#else\n#define N "
        "1\n#endif\n",
        "N",
        2,
    ),
    "limits without an include": (
        "#if INT_MAX == 2147483647 && defined(M_PI) && defined(INFINITY)\n#define N 2\n#else\n#define N "
        "1\n#endif\n",
        "N",
        2,
    ),
    "limits of integers": (
        "#include <cstdint>\n#ifdef INT64_MAX\n#define N 2\n#else\n#define N 1\n#endif\n",
        "N + (UINT32_MAX > 5u)",
        3,
    ),
    "table": (
        "static const int table[3] = {1, 2, 3};\n__constant__ float more[2] = {4, 5};\n",
        "table[out == 0 ? 0 : 2] + more[1]",
        8,
    ),
    "enum class": (
        "#include <cstdint>\nenum class Mode : std::uint8_t { A, B };\n",
        "sizeof(Mode) + int(Mode::B)",
        2,
    ),
    "alias in a namespace": (
        "#include <cstdint>\ntypedef short idx;\nnamespace n { using idx = std::int64_t; enum { v = "
        "sizeof(idx) }; }\n",
        "n::v",
        8,
    ),
    "half overloads": (
        "#include <cuda_fp16.h>\ntypedef __half Half;\n__device__ int bits(float) { return 32; }\n"
        "__device__ int bits(Half) { return 16; }\n",
        "bits(__float2half(1.f))",
        16,
    ),
    "variadic": (
        "template <typename... T> __device__ float sum(T... x) { return (0.f + ... + x); }\n",
        "sum(1, 2.f, 3.0)",
        6,
    ),
    "lambda": ("", "[](auto a) { return a * 2; }(3.f)", 6),
    "undef": ("#define N 2\n#define M N\n#undef N\n#define N 3\n", "M", 3),
    "inline namespace": ("inline namespace v1 {\n" + SPEC + TWO + "}\n", "v1::f(1.f)", 2),
    "X macro": (
        "#define TYPES(X) X(float, 2) X(int, 3)\n"
        + ACC
        + "#define ONE(T, n) template <> struct Acc<T> { enum { v = n }; };\nTYPES(ONE)\n",
        "Acc<float>::v * 10 + Acc<int>::v",
        23,
    ),
}
HOST = {  # host code that nvcc compiles
    "none": "",
    "launch": "void run(float* x) { k<<<1, 1>>>(x); }\n",
    "stream": "#include <cuda_runtime.h>\n#define CHECK(e) do { cudaError_t r = (e); "
    "if (r != cudaSuccess) abort(); } while (0)\n"
    'extern "C" int run(float* x, cudaStream_t s) { k<<<1, 1, 0, s>>>(x); CHECK(cudaGetLastError()); return '
    "0; }\n",
    "main": "#include <cstdio>\n#include <vector>\nint main() {\n  "
    "std::vector<float> v(4);\n  float* d;\n  cudaMalloc(&d, 16);\n"
    '  k<<<1, 1>>>(d);\n  printf("%f\\n", v[0]);\n  return 0;\n}\n',
    "template": "template <typename T> void run(T* x, int n) { k<<<n, 1>>>((float*)x); }\ntemplate void "
    "run<int>(int*, int);\n",
    "class": "#include <string>\n#include <stdexcept>\nclass Runner {\n public:\n  explicit Runner(int n) : "
    "n_(n) {}\n"
    '  void go(float* x) { if (n_ < 0) throw std::runtime_error("n"); k<<<n_, 1>>>(x); }\n private:\n  int '
    "n_;\n"
    "  std::string name_;\n};\n",
    "__host__": "__host__ static void run(float* x) { k<<<1, 1>>>(x); cudaDeviceSynchronize(); }\n",
    "macro": "#define RUN(name, T) void run_##name(T* x) { k<<<1, 1>>>((float*)x); }\nRUN(f, float)\nRUN(i, "
    "int)\n",
    "comments": "/* to tune:\n#undef k\n#define out 5\n*/\nvoid run(float* x) { k<<<1, "
    '1>>>(x); const char* s = R"(\n#define out 5\n)"; }\n',
    "iostream": "#include <iostream>\n#include <map>\nstatic std::map<int, float> "
    "seen;\nvoid run(const std::string& s) {\n"
    "  std::cout << s << std::endl; seen[1] = 2; k<<<1, 1>>>(nullptr); }\n",
    "directives": "#include <cstdlib>\nvoid run(float* x) {\n#ifdef VERBOSE\n  "
    'puts("a");\n#else\n  k<<<1, 1>>>(x);\n#endif\n'
    "#define AFTER 1\n}\n#ifndef AFTER\n#error the directive in the body counts\n#endif\n",
}
TORCH = {  # needs the headers of torch
    "load_inline": "torch::Tensor run(torch::Tensor x) {\n  TORCH_CHECK(x.is_cuda(), "
    '"cuda");\n  k<<<1, 1>>>(x.data_ptr<float>());\n  return x;\n}\n',
    "dispatch": "#include <torch/extension.h>\n#include <ATen/cuda/CUDAContext.h>\n"
    "std::vector<at::Tensor> run(at::Tensor x, c10::optional<at::Tensor> y) {\n"
    '  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "run", ([&] {\n    '
    "k<<<1, 1, 0, at::cuda::getCurrentCUDAStream()>>>(x.data_ptr<scalar_t>());\n"
    '  }));\n  return {x};\n}\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("run", &run); }\n',
    "library": "#include <torch/library.h>\nusing namespace at;\nusing "
    "torch::Tensor;\nstatic Tensor run(const Tensor& x) { k<<<1, 1>>>((float*)x.data_ptr()); return x; }\n"
    'TORCH_LIBRARY(mine, m) { m.def("run(Tensor x) -> Tensor"); }\n'
    'TORCH_LIBRARY_IMPL(mine, CUDA, m) { m.impl("run", &run); }\n',
    "template": "#include <torch/types.h>\ntemplate <typename T> void "
    "run(torch::Tensor x) { k<<<1, 1>>>(x.data_ptr<T>()); }\n"
    "void both(torch::Tensor x) { run<float>(x); run<double>(x); }\n",
}


def text(device: str, host: str) -> str:
    """A program of device code, its kernel, and host code before and behind the kernel's declaration."""
    declarations, value, _ = DEVICE[device]
    code = {**HOST, **{f"torch {name}": code for name, code in TORCH.items()}}[host]
    kernel = f"__global__ void k(float* out) {{ out[0] = {value}; }}"
    return f"{declarations}__global__ void k(float* out);\n{code}{kernel}\n"


HOSTS = [*HOST, *(f"torch {name}" for name in TORCH)]
PAIRS = [(d, h) for i, d in enumerate(DEVICE) for j, h in enumerate(HOSTS) if (i + j) % 6 == 0]
