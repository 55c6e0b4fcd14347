"""Where sources are found, and what their digest covers."""

import shutil
import time

import pytest
from helpers import before_compiling, write

import cukern
from cukern.runtime.compile.compiler import CompileError, compile_ptx
from cukern.runtime.compile.sources import Source, blanked, kernels_dir


def test_the_shipped_sources_are_found():
    assert (kernels_dir() / "square.cu").is_file()
    assert Source.read(kernels_dir() / "square.cu").path.is_absolute()


@pytest.fixture
def tree(tmp_path):
    """a.cu includes sub/b.cuh, which includes c.cuh from its own folder and d.cuh from a.cu's folder. No file
    includes e.cuh."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.cu").write_text('#include "sub/b.cuh"\n__global__ void k() {}\n')
    (tmp_path / "sub/b.cuh").write_text(
        '#pragma once\n  #  include "c.cuh"\n#include "d.cuh"\n#include "../a.cu"\n'
    )
    for name in ("sub/c.cuh", "d.cuh", "e.cuh"):
        (tmp_path / name).write_text("// nothing\n")
    return tmp_path


def test_the_digest_covers_the_included_files_and_not_their_folder(tree, tmp_path_factory):
    other = shutil.copytree(tree, tmp_path_factory.mktemp("other") / "copy")
    digests = [Source.read(folder / "a.cu").digest() for folder in (other, tree)]
    for edited in ("e.cuh", "a.cu", "sub/b.cuh", "sub/c.cuh", "d.cuh"):
        with (tree / edited).open("a") as file:
            file.write("// edited\n")
        digests.append(Source.read(tree / "a.cu").digest())
    assert digests[0] == digests[1] == digests[2] and len(set(digests)) == 5, "e.cuh is not included"


def test_two_headers_of_one_name_both_count(tmp_path):
    """Also outside of the source's own folder."""
    for folder in ("x", "y", "main"):
        (tmp_path / folder).mkdir()
    path, digests = write(tmp_path, '#include "../x/h.cuh"\n#include "../y/h.cuh"\n', "main/a.cu"), set()
    for x, y in ((1, 1), (2, 1), (1, 2), (2, 2)):
        write(tmp_path, f"#define X {x}\n", "x/h.cuh")
        write(tmp_path, f"#define Y {y}\n", "y/h.cuh")
        digests.add(Source.read(path).digest())
    assert len(digests) == 4


def test_missing_header_is_left_to_the_compiler(tmp_path):
    assert Source.read(write(tmp_path, '#include "nowhere.cuh"\n')).digest()


def test_text_given_as_a_string_reaches_the_shipped_headers():
    text = '#include "common/vec.cuh"\n'
    assert Source.from_text(text).digest() != Source.from_text(text.replace("vec", "math")).digest()
    assert any(path.name == "vec.cuh" for path in Source.from_text(text).program.files)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("int a; // one\nint b;", "int a; int b;"),
        ("int a; // one \\\n two\nint b;", "int a; int b;"),
        ("int a; /* one\n*/ int b;", "int a; int b;"),
        ('f("// no comment"); // but this', 'f("// no comment");'),
        (r'f("a \" /* b"); /* c */', r'f("a \" /* b");'),
        ("f('\"', '\\'', 1'000); // c", "f('\"', '\\'', 1'000);"),
        ('f(R"x(/* " )" )x"); // c', "f(R );"),
        ('FOOR"(" /*)"*/', 'FOOR"("'),
        ("int a; /* no end\n", "int a;"),
    ],
)
def test_comments_and_raw_strings_are_blanked(text, expected):
    assert " ".join(blanked(text).split()) == expected and len(blanked(text)) == len(
        blanked(text, literals=True)
    ) == len(text)


# ---- which files a program includes; it is compiled from their texts as they were read

USE = "__global__ void k(int* x) { *x = V; }\n"
FORMS = {
    "plain": '#include "h.cuh"\n',
    "angled": "#include <h.cuh>\n",
    "spaced": ' \t # \t include \t "h.cuh" // why\n',
    "after a comment": '/* a */ #include "h.cuh"\n',
    "after a long comment": '/* a\n b */ #include /* c\n d */ "h.cuh"\n',
    "no blank": '#include"h.cuh"\n',
    "digraph": '%:include "h.cuh"\n',
    "spliced": '#include \\\n "h.cuh"\n',
    "spliced in the word": '#inc\\\nlude "h.\\\ncuh"\n',
    "after a spliced comment": '// a \\\n b\n#include "h.cuh"\n',
    "macro": '#define H "h.cuh"\n#include H\n',
    "angled macro": "#define H <h.cuh>\n#include H\n",
    "spliced macro": '#define H \\\n "h.cuh"\n#include H\n',
    "macro of a macro": '#define G "h.cuh"\n#define H G\n#include H\n',
    "include_next": '#include_next "h.cuh"\n',
    "__has_include": '#if __has_include("h.cuh")\n#define H "h.cuh"\n#else\n#define V 0\n#endif\n#include '
    "H\n",
    "absolute": "#include <{folder}/h.cuh>\n",
    "dots": '#include "./sub/../h.cuh"\n',
    "of a header": '#include "sub/outer.cuh"\n',
    "include_next of a header": '#include "sub/next/h.cuh"\n',
    "twice": '#include "h.cuh"\n#include "sub/../h.cuh"\n#include <h.cuh>\n',
    "after an apostrophe": '#if 0\ndon\'t /* \\\n*/\n#endif\n#include "h.cuh"\n',
    "after a raw string": '__device__ const char* s = R"(\n#include "nowhere.cuh"\n/* )";\n#include '
    '"h.cuh"\n',
    "windows": '#include "h.cuh"\r\n',
}


@pytest.fixture
def forms(tmp_path):
    tmp_path = tmp_path / 'a "quoted" \u00fcber'
    (tmp_path / "sub/next").mkdir(parents=True)
    (tmp_path / "sub/outer.cuh").write_text('#include "inner.cuh"\n')
    (tmp_path / "sub/inner.cuh").write_text('#pragma once\n#include "../h.cuh"\n')
    (tmp_path / "sub/next/h.cuh").write_text('#include_next "h.cuh"\n')
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_what_is_compiled_is_what_was_hashed(form, forms, empty_cache):
    """An edit of the header changes the digest and the code; one between the digest and the compiler does not
    reach the code."""
    header, path = forms / "h.cuh", forms / "a.cu"
    path.write_bytes((FORMS[form].replace("{folder}", str(forms)) + USE).encode())
    digests, codes = [], []
    for value in (11, 22):
        header.write_text(f"#pragma once\nenum {{ V = {value} }};\n")
        source = Source.read(path)
        digests.append(source.digest())
        header.write_text("#pragma once\nenum { V = 33 };\n")
        codes.append(compile_ptx(source, "k", "compute_80").text)
    assert digests[0] != digests[1] and "11;" in codes[0] and "22;" in codes[1]


def test_a_header_that_no_literal_names_is_an_error_and_not_a_stale_kernel(forms, empty_cache):
    write(forms, "#define V 1\n", "h.cuh")
    path = write(forms, f"#define TEXT(x) #x\n#define FILE(x) TEXT(x)\n#include FILE(h.cuh)\n{USE}")
    says = (
        r"(?s)k\.cu\(3\).*open source file \"h\.cuh\"\n.*no #include or #define with the literal name 'h.cuh'"
    )
    with pytest.raises(CompileError, match=says):
        cukern.load(path).compile("sm_90a")


def test_a_name_of_two_files_is_each_where_it_is_literal_and_refused_in_a_macro(tmp_path, empty_cache):
    for folder, value in (("x", 1), ("y", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "h.cuh").write_text(f"enum {{ {folder.upper()} = {value}1 }};\n")
        (tmp_path / folder / "outer.cuh").write_text('#include "h.cuh"\n')
    (tmp_path / "a.cu").write_text(
        '#include "x/outer.cuh"\n#include "y/outer.cuh"\n__global__ void k(int* a) { a[X] = Y; }\n'
    )
    code = compile_ptx(Source.read(tmp_path / "a.cu"), "k", "compute_80").text
    assert "+44]" in code and "21;" in code
    for folder in "xy":
        (tmp_path / folder / "outer.cuh").write_text('#define H "h.cuh"\n#include H\n#undef H\n')
    with pytest.raises(
        CompileError, match=r"may be any of .*x/h\.cuh, .*y/h\.cuh: include it by a literal name"
    ):
        compile_ptx(Source.read(tmp_path / "a.cu"), "k", "compute_80")


def test_a_header_beside_the_source_and_a_shipped_one_of_the_same_name_both_count(tmp_path):
    (tmp_path / "common").mkdir()
    path = write(tmp_path, f'#include "common/vec.cuh"\n#include "{kernels_dir()}/common/vec.cuh"\n')
    digests = set()
    for text in ("// 1", "// 2"):
        write(tmp_path, text, "common/vec.cuh")
        digests.add(Source.read(path).digest())
    assert len(digests) == 2


def test_a_cached_kernel_is_of_the_headers_that_were_hashed(tmp_path, empty_cache, monkeypatch):
    """An edit while NVRTC compiles: the next load compiles the new text, and the old text has its own
    entry."""
    write(tmp_path, "#define V 11\n", "h.cuh")
    path = write(tmp_path, f'#include "h.cuh"\n{USE}')
    with monkeypatch.context() as patch:
        before_compiling(patch, lambda _: write(tmp_path, "#define V 22\n", "h.cuh"))
        first = compile_ptx(Source.read(path), "k")
    second = compile_ptx(Source.read(path), "k")
    write(tmp_path, "#define V 11\n", "h.cuh")
    assert "11;" in first.text and "22;" in second.text and compile_ptx(Source.read(path), "k") == first


HOSTILE = {
    "comments": "/*" * 100_000,
    "kernels": "__global__ k(" * 100_000,
    "nested kernels": "__global__ k(" * 50_000 + ")" * 50_000,
    "raw strings": 'R"a(' * 100_000,
    "includes": '#include "' * 100_000,
    "host includes": "\n#include <torch" * 50_000,
    "splices": "\\\n" * 100_000,
    "spliced includes": "#include \\\n" * 50_000,
    "namespaces": "namespace a " * 50_000 + "namespace" + " " * 100_000,
    "brackets": "{" * 200_000 + "<<<",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_time_is_linear_in_the_length(kind):
    start = time.process_time()
    source = Source.from_text(HOSTILE[kind])
    source.digest()
    assert len(source.kernels) <= 1 and time.process_time() - start < 5
