// Declarations of what host functions in a .cu file name: containers, streams, PyTorch, libraries. None has a
// definition that runs, so that a kernel that uses one does not link; containers have the size that they have
// under libstdc++.
#pragma once
#include "helpers.h"
namespace std {
#define CUKERN_CONTAINER(name, words)             \
    template <typename... T_>                     \
    class name {                                  \
        void* words_[words] = {};                 \
                                                  \
      public:                                     \
        constexpr name() {}                       \
        name(const name&);                        \
        template <typename U_>                    \
        constexpr name(initializer_list<U_>) {}   \
        template <typename U_, typename... A_>    \
        constexpr explicit name(U_&&, A_&&...) {} \
    };
CUKERN_CONTAINER(vector, 3)
CUKERN_CONTAINER(list, 3)
CUKERN_CONTAINER(map, 6)
CUKERN_CONTAINER(set, 6)
CUKERN_CONTAINER(unordered_map, 7)
CUKERN_CONTAINER(unordered_set, 7)
CUKERN_CONTAINER(deque, 10)
CUKERN_CONTAINER(function, 4)
CUKERN_CONTAINER(shared_ptr, 2)
CUKERN_CONTAINER(unique_ptr, 1)
CUKERN_CONTAINER(weak_ptr, 2)
CUKERN_CONTAINER(lock_guard, 1)
CUKERN_CONTAINER(unique_lock, 2)
template <typename... T_>
class tuple;
template <typename T_>
class optional;
template <typename T_>
class atomic;
template <typename... T_>
class variant;
class string {
    void* words_[4] = {};

  public:
    constexpr string() {}
    constexpr string(const char*) {}
    string(const string&);
};
class string_view;
class mutex {
    void* words_[5] = {};

  public:
    constexpr mutex() {}
    mutex(const mutex&) = delete;
};
class ostream;
class istream;
class ofstream;
class ifstream;
class stringstream;
class ostringstream;
class exception;
class runtime_error;
class thread;
class random_device;
class mt19937;
}  // namespace std
struct FILE;

namespace c10 {
class Device;
class Scalar;
class Storage;
class TensorOptions;
class SymInt;
struct Half;
struct BFloat16;
struct nullopt_t;
enum class ScalarType : signed char;
enum class DeviceType : signed char;
template <typename T_>
class ArrayRef;
template <typename T_>
class List;
template <typename T_>
using optional = std::optional<T_>;
using IntArrayRef = ArrayRef<int64_t>;
namespace cuda {
class CUDAStream;
class CUDAGuard;
class OptionalCUDAGuard;
}  // namespace cuda
}  // namespace c10
namespace at {
using namespace c10;
class Tensor;
class TensorBase;
class Generator;
struct PhiloxCudaState;
struct TensorIterator;
struct TensorIteratorBase;
using TensorList = ArrayRef<Tensor>;
namespace cuda {
using namespace c10::cuda;
}
namespace native {}
namespace indexing {}
}  // namespace at
namespace torch {
using namespace at;
using at::Device;
using at::ScalarType;
using at::Tensor;
using at::TensorList;
using at::TensorOptions;
using c10::IntArrayRef;
using c10::optional;
using Dtype = at::ScalarType;
namespace indexing {}
namespace autograd {
struct AutogradContext;
template <typename T_>
class Function;
using tensor_list = std::vector<at::Tensor>;
using variable_list = std::vector<at::Tensor>;
}  // namespace autograd
namespace nn {
namespace functional {}
}  // namespace nn
class Library;
}  // namespace torch
namespace pybind11 {
class module_;
class object;
class array;
class dict;
class list;
class tuple;
}  // namespace pybind11
namespace py = pybind11;
extern "C" __device__ void cukern_host_code_was_removed();
#define PYBIND11_MODULE(name, variable) static void cukern_pybind11(pybind11::module_& variable)
#define TORCH_LIBRARY(space, variable) static void cukern_library_##space(torch::Library& variable)
#define TORCH_LIBRARY_FRAGMENT(space, variable) static void cukern_fragment_##space(torch::Library& variable)
#define TORCH_LIBRARY_IMPL(space, key, variable) \
    static void cukern_library_##space##_##key(torch::Library& variable)
