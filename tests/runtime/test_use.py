"""cukern.use and CUKERN_<OP>: one version for a block or a process."""

import pytest
import torch
from helpers import run_python

import cukern
from cukern.runtime import backend
from cukern.runtime.device import KNOWN, assumed
from cukern.runtime.kernel import collecting
from cukern.runtime.registry import OPS
from cukern.runtime.warmup import planned


def launched(op="softmax", dims=(4, 64)):
    """The kernels, without template arguments, that forward and backward launch on an H200."""
    return {name.partition("<")[0] for name in planned(OPS[op], [dims], (torch.float32,), KNOWN["h200"])}


def test_a_block_chooses_the_version():
    usual = launched()
    with cukern.use("softmax", "v3"):
        assert launched() == {"softmax_v3", "softmax_v3_bwd"}
        with cukern.use("softmax", "v2", backward="v4"):
            assert launched() == {"softmax_v2", "softmax_v4_bwd"}
        assert launched() == {"softmax_v3", "softmax_v3_bwd"}
    assert launched() == usual and not usual & {"softmax_v3", "softmax_v3_bwd"}


def test_one_of_forward_and_backward_may_stay_the_default():
    (usual,) = (name for name in launched() if not name.endswith("_bwd"))
    (usual_backward,) = launched() - {usual}
    with cukern.use("softmax", "v3", backward="default"):
        assert launched() == {"softmax_v3", usual_backward}
        with cukern.use("softmax", "default", backward="v4"):
            assert launched() == {usual, "softmax_v4_bwd"}
        with cukern.use("softmax", "default"):
            assert launched() == {usual, usual_backward}


def test_ops_with_one_table_change_together():
    with cukern.use("matmul", "v2"):
        assert launched("linear", (8, 8, 8)) == launched("matmul", (8, 8, 8)) == {"matmul_v2"}
        assert "softmax_v3" not in launched()
    with cukern.use("linear_gelu", "v6"):  # a part of that table
        assert any("matmul_v6" in name for name in launched("linear_gelu", (8, 8, 8)))


def test_an_explicit_version_wins_and_cpu_tensors_keep_the_reference():
    x = torch.randn(4, 64)
    with cukern.use("softmax", "v3"):
        assert torch.equal(cukern.softmax(x), torch.softmax(x, -1))
        with assumed(KNOWN["h200"]), backend.backend("sim"), collecting() as found:
            cukern.softmax(x, version="v2")
        assert {name.partition("<")[0] for name in found} == {"softmax_v2"}


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (("softmx", "v1"), ValueError, "op must be one of"),
        (("softmax", "v99"), ValueError, r"version of cukern\.softmax must be one of v1, .*, got 'v99'"),
        (("softmax", 5), TypeError, r"version of cukern\.softmax must be a str"),
        ((None, "v1"), TypeError, "op must be a str"),
    ],
)
def test_unknown_names_are_refused_at_once(arguments, error, words):
    with pytest.raises(error, match=words):
        cukern.use(*arguments)
    with pytest.raises(error, match=words):
        cukern.use("softmax", "v1", backward=arguments[1]) if arguments[0] == "softmax" else cukern.use(*arguments)


def test_an_environment_variable_chooses_for_a_process():
    code = """
import torch, cukern
from cukern.runtime.kernel import collecting
x = torch.randn(4, 64)
try:
    with cukern.backend("sim"), collecting() as found:
        cukern.softmax(x)
    print(*found)
except ValueError as error:
    print(error)
"""
    assert run_python(code, CUKERN_SOFTMAX="v3").stdout == "softmax_v3<float>\n"
    assert "CUKERN_SOFTMAX: cukern.softmax has no version 'nine'; it has v1" in run_python(code, CUKERN_SOFTMAX="nine").stdout
