"""Where sources are found, what their digest covers, and what is taken out of them."""

import shutil

import pytest
from helpers import SQUARE_MATRIX

from cukern.runtime.sources import Source, kernels_dir, without_comments, without_host_code


def test_the_shipped_sources_are_found():
    assert (kernels_dir() / "square.cu").is_file()
    assert Source.read(kernels_dir() / "square.cu").path.is_absolute()


@pytest.fixture
def tree(tmp_path):
    """a.cu includes sub/b.cuh, which includes c.cuh of its own folder and d.cuh of a.cu's; e.cuh is included by none."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.cu").write_text('#include "sub/b.cuh"\n__global__ void k() {}\n')
    (tmp_path / "sub/b.cuh").write_text('#pragma once\n  #  include "c.cuh"\n#include "d.cuh"\n#include "../a.cu"\n')
    for name in ("sub/c.cuh", "d.cuh", "e.cuh"):
        (tmp_path / name).write_text("// nothing\n")
    return tmp_path


@pytest.mark.parametrize("edited", ["a.cu", "sub/b.cuh", "sub/c.cuh", "d.cuh"])
def test_an_edit_of_the_file_or_of_any_header_changes_the_digest(tree, edited):
    before = Source.read(tree / "a.cu").digest()
    with (tree / edited).open("a") as file:
        file.write("// edited\n")
    assert Source.read(tree / "a.cu").digest() != before


def test_an_edit_of_a_file_that_is_not_included_does_not_change_the_digest(tree):
    before = Source.read(tree / "a.cu").digest()
    (tree / "e.cuh").write_text("// edited\n")
    assert Source.read(tree / "a.cu").digest() == before


def test_digest_is_of_content_and_not_of_the_place(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "copy"
    shutil.copytree(tree, other)
    assert Source.read(other / "a.cu").digest() == Source.read(tree / "a.cu").digest()


def test_two_headers_of_one_name_both_count(tmp_path):
    """Outside of the source's own folder, too."""
    for folder in ("x", "y", "main"):
        (tmp_path / folder).mkdir()
    (tmp_path / "main/a.cu").write_text('#include "../x/h.cuh"\n#include "../y/h.cuh"\n')
    digests = set()
    for x, y in ((1, 1), (2, 1), (1, 2), (2, 2)):
        (tmp_path / "x/h.cuh").write_text(f"#define X {x}\n")
        (tmp_path / "y/h.cuh").write_text(f"#define Y {y}\n")
        digests.add(Source.read(tmp_path / "main/a.cu").digest())
    assert len(digests) == 4


def test_a_header_in_angle_brackets_counts_where_the_compiler_would_find_it(tmp_path):
    """`#include <h.cuh>` reaches a file beside the source, because that folder is on NVRTC's include path."""
    (tmp_path / "a.cu").write_text("#include <h.cuh>\n#include <cuda_fp16.h>\n")
    (tmp_path / "h.cuh").write_text("#define X 1\n")
    before = Source.read(tmp_path / "a.cu").digest()
    (tmp_path / "h.cuh").write_text("#define X 2\n")
    assert Source.read(tmp_path / "a.cu").digest() != before


def test_a_missing_header_is_the_compilers_business(tmp_path):
    (tmp_path / "a.cu").write_text('#include "nowhere.cuh"\n')
    assert Source.read(tmp_path / "a.cu").digest()


def test_text_given_as_a_string_reaches_the_shipped_headers():
    text = '#include "common/vec.cuh"\n'
    assert Source.from_text(text).digest() != Source.from_text(text.replace("vec", "math")).digest()
    names = Source.from_text(text)._closure()
    assert any(name.endswith("vec.cuh") for name in names)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("int a; // one\nint b;", "int a;  \nint b;"),
        ("int a; /* one\ntwo\n*/ int b;", "int a; \n\n int b;"),
        ('f("// no comment"); // but this', 'f("// no comment");  '),
        (r'f("a \" /* b"); /* c */', r'f("a \" /* b");  '),
        ("int /* x */ a;", "int   a;"),
        ('a // \\" \nb', "a  \nb"),
    ],
)
def test_comments_go_and_lines_stay(text, expected):
    assert without_comments(text) == expected
    assert without_comments(text).count("\n") == text.count("\n")


def test_host_code_of_load_inline_goes_and_lines_stay():
    text = without_host_code("#include <torch/extension.h>\n" + SQUARE_MATRIX)
    assert "torch" not in text and "<<<" not in text and "square_matrix(" not in text
    where = text.splitlines().index("        result[idx] = matrix[idx] * matrix[idx];")
    assert where == SQUARE_MATRIX.splitlines().index("        result[idx] = matrix[idx] * matrix[idx];") + 1
    assert text.count("\n") == SQUARE_MATRIX.count("\n") + 1


def test_device_code_around_host_code_stays():
    device = """
template <typename T> struct Pair { T a, b; };
__device__ float twice(float x) { return 2 * x; }
__constant__ float table[2] = {1, 2};
namespace inner { __global__ void k(float* out) { out[0] = twice(table[1]); } }
"""
    host = "void launch(torch::Tensor t) { inner::k<<<1, 1>>>(t.data_ptr<float>()); }\n"
    text = without_host_code(device + host)
    for line in device.strip().splitlines():
        assert line in text
    assert "launch" not in text


def test_code_without_a_host_part_is_unchanged():
    text = "__global__ void k(int* p) { *p = 1 << 3; }  // torch\n"
    assert without_host_code(text) == text


def test_host_code_is_skipped_and_the_lines_stay():
    text = (
        "#include <torch/extension.h>\n#define ONE 1\ntorch::Tensor host(torch::Tensor x) {\n    f<<<1, 1>>>(x.data_ptr<float>());\n}\n"
        "__global__ void f(float* x) { x[0] = ONE; }\nPYBIND11_MODULE(m, m) { m.def(); }\n"
    )
    kept = without_host_code(text)
    assert kept.count("\n") == text.count("\n")
    assert [line for line in kept.split("\n") if line] == ["#define ONE 1", "__global__ void f(float* x) { x[0] = ONE; }"]
