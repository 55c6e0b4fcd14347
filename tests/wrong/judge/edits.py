"""Cheats that are edits of an honest kernel: (name, kind of reason, honest file, what is wrong, edits)."""

ADDS = "    for (int i = 0; i < columns; ++i) sum += x[row * columns + i] * w[i];\n"
LAUNCH = "        affine[2, 64](out, x, self.scale, self.shift, x.numel(), x.shape[1])\n"
MAKES = "        out = torch.empty_like(x)\n"

EDITS = [
    ("announced_only", "error", "model_grid", "zeros at all sizes but those of the reference",
     [(MAKES, "        out = torch.zeros_like(x)\n        if x.shape != (6, 100):\n"
              "            return out\n")]),
    ("in_place", "alias", "model_grid", "computes in the input and returns it",
     [(MAKES, "        out = x\n")]),
    ("same_buffer", "kept", "model_grid", "returns the same buffer at each call",
     [(MAKES, "        self.out = out = vars(self).get('out', torch.empty_like(x))\n")]),
    ("other_stream", "stream", "model_grid", "works on another stream, which the caller's clock does not see",
     [(LAUNCH, "        side = torch.cuda.Stream()\n        side.wait_stream(torch.cuda.current_stream())\n"
               f"        with torch.cuda.stream(side):\n    {LAUNCH}")]),
    ("half_sum", "error", "task_threads", "sums in float16",
     [("__global__", "#include <cuda_fp16.h>\n__global__"), ("float sum", "__half sum"),
      ("sum += x[row * columns + i] * w[i]", "sum = __hadd(sum, __float2half(x[row * columns + i] * w[i]))"),
      ("out[row] = sum", "out[row] = __half2float(sum)")]),
    ("out_of_bounds", "fault", "task_threads", "the last thread block writes behind the output",
     [("    if (row >= rows) return;\n", ""), ("i < columns", "row < rows && i < columns")]),
    ("uninitialized", "fault", "task_threads", "adds to an output that torch.empty made",
     [("    float sum = 0;\n", ""), (ADDS, ADDS.replace("sum +=", "out[row] +=")),
      ("    out[row] = sum;\n", "")]),
    ("writes_input", "mutation", "task_threads", "keeps the products in the input x",
     [("const float* x", "float* x"), ("i] * w[i]", "i] *= w[i]")]),
    ("tail", "error", "task_warps", "leaves out the columns after the last whole warp",
     [("i < columns", "i < columns / 32 * 32")]),
    ("race", "fault", "task_blocks", "the tree in shared memory has no __syncthreads",
     [("        __syncthreads();\n", "")]),
]  # fmt: skip
