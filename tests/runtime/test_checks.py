"""Each check names the value and the rule that it breaks."""

import pytest
import torch

from cukern.runtime import checks


def test_dtype():
    checks.dtype("x", torch.zeros(2), checks.FLOATS)
    with pytest.raises(
        TypeError,
        match=r"^x must be torch\.float16, torch\.bfloat16, torch\.float32 or torch\.float64, got "
        r"torch\.int32$",
    ):
        checks.dtype("x", torch.zeros(2, dtype=torch.int32), checks.FLOATS)
    with pytest.raises(TypeError, match=r"^w must be torch\.float64, got torch\.float32$"):
        checks.dtype("w", torch.zeros(2), (torch.float64,))


def test_layout():
    with pytest.raises(TypeError, match=r"^x must be a strided tensor, got layout torch\.sparse_coo$"):
        checks.dtype("x", torch.eye(2).to_sparse(), checks.FLOATS)


def test_negative_bit():
    with pytest.raises(ValueError, match=r"^x has the negative bit set .*: pass x\.resolve_neg\(\)$"):
        checks.dtype("x", torch._neg_view(torch.zeros(2)), checks.FLOATS)


def test_same():
    a = torch.zeros(2)
    checks.same(a=a, b=torch.ones(3), bias=None)
    with pytest.raises(
        TypeError, match=r"^b is torch\.float64, a is torch\.float32: they must have one dtype$"
    ):
        checks.same(a=a, bias=None, b=torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^b is on meta, a is on cpu: they must be on one device$"):
        checks.same(a=a, b=torch.zeros(2, device="meta"))


def test_shape():
    checks.shape("bias", torch.zeros(3), (3,), "one value for each row of weight")
    with pytest.raises(
        ValueError, match=r"^bias has shape \(2,\), it must be \(3,\): one value for each row of weight$"
    ):
        checks.shape("bias", torch.zeros(2), (3,), "one value for each row of weight")


def test_versions():
    with pytest.raises(ValueError, match=r"^cukern\.square has no version 'v9'; it has v1, v2$"):
        checks.unknown_version("square", "v9", ("v1", "v2"))
    with pytest.raises(
        ValueError, match=r"version 'v1' of cukern\.square is a CUDA kernel, the tensor is on cpu"
    ):
        checks.needs_gpu("square", "v1", torch.device("cpu"))
