"""The CPU kernels: the scalar ones are MLX's bit for bit, the others within 2e-6 of what is exact.

Exact is float64. MLX's own sums, one product after another, are up to 2.3e-6 from it at these shapes, the vector
kernels' 0.9e-6; so MLX is no measure for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest

from sparkle import _mlx_ops

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
SHAPES = ((36, 128), (70, 512), (7, 1152), (1, 128))  # whole and broken tiles; 1152 in groups of 128: 9 of them
DTYPES = (mx.float32, mx.bfloat16, mx.float16)
ROWS = 9  # two tiles of four and one more
TOLERANCE = 2e-6  # of the largest output
DTYPE_NAMES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16"}

Quantized = tuple[mx.array, mx.array, mx.array]
Exact = npt.NDArray[np.float64]


@pytest.fixture(scope="module", autouse=True)
def cpu() -> None:
    mx.set_default_device(mx.cpu)


@pytest.fixture(params=_mlx_ops.kernel_names())
def processor(request: pytest.FixtureRequest) -> _mlx_ops.Processor:
    return _mlx_ops.Processor(request.param, 2, 20)


def _matrix(rng: np.random.Generator, shape: tuple[int, int], bits: int, group: int, dtype: mx.Dtype) -> Quantized:
    w, scales, biases = mx.quantize(mx.array(rng.normal(size=shape).astype(np.float32)), group_size=group, bits=bits)
    return w, scales.astype(dtype), biases.astype(dtype)


def _by_mlx(x: mx.array, matrix: Quantized, group: int, bits: int) -> mx.array:
    w, scales, biases = matrix
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.quantized_matmul(x, w, scales, biases, transpose=True, group_size=group, bits=bits)


def _exact(x: Exact, matrix: Quantized, group: int, bits: int) -> Exact:
    w, scales, biases = matrix
    ones, zeros = mx.ones(scales.shape), mx.zeros(scales.shape)
    values = np.array(mx.dequantize(w, ones, zeros, group_size=group, bits=bits), np.float64)
    wide = [np.repeat(np.array(a.astype(mx.float32), np.float64), group, axis=-1) for a in (scales, biases)]
    product: Exact = x @ (wide[0] * values + wide[1]).T
    return product


def _check(processor: _mlx_ops.Processor, y: mx.array, by_mlx: mx.array, exact: Exact) -> None:
    if processor.kernels == "scalar":
        assert mx.array_equal(y, by_mlx)
    else:
        assert np.abs(np.array(y, np.float64) - exact).max() <= TOLERANCE * np.abs(exact).max()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_linear_is_what_mlx_computes(processor: _mlx_ops.Processor, bits: int, group: int) -> None:
    rng = np.random.default_rng(bits * 1000 + group)
    for shape in SHAPES:
        for dtype in DTYPES:
            matrix = _matrix(rng, shape, bits, group, dtype)
            x = mx.array(rng.normal(size=(ROWS, shape[1])).astype(np.float32))
            y = _mlx_ops.quantized_linear(processor, x, *matrix, group_size=group, bits=bits)
            _check(processor, y, _by_mlx(x, matrix, group, bits), _exact(np.array(x, np.float64), matrix, group, bits))


@pytest.mark.parametrize("bits", BITS)
def test_rows_do_not_change_each_other(processor: _mlx_ops.Processor, bits: int) -> None:
    """Every output has the bits that its row has alone, in any number of rows, by any number of threads."""
    rng = np.random.default_rng(bits)
    matrix = _matrix(rng, (75, 256), bits, 64, mx.bfloat16)
    x = mx.array(rng.normal(size=(70, 256)).astype(np.float32))
    alone = mx.concatenate(
        [_mlx_ops.quantized_linear(processor, row[None], *matrix, group_size=64, bits=bits) for row in x]
    )
    single = _mlx_ops.Processor(processor.kernels, 1, 0)
    for n in (1, 2, 3, 4, 5, 31, 33, 70):
        for use in (processor, single):
            y = _mlx_ops.quantized_linear(use, x[:n], *matrix, group_size=64, bits=bits)
            assert mx.array_equal(y, alone[:n])


def test_leading_dimensions_and_strides(processor: _mlx_ops.Processor) -> None:
    rng = np.random.default_rng(1)
    matrix = _matrix(rng, (12, 128), 8, 64, mx.float32)
    x = mx.array(rng.normal(size=(3, 128, 2)).astype(np.float32)).transpose(2, 0, 1)
    y = _mlx_ops.quantized_linear(processor, x, *matrix, group_size=64, bits=8)
    assert y.shape == (2, 3, 12)
    _check(processor, y, _by_mlx(x, matrix, 64, 8), _exact(np.array(x, np.float64), matrix, 64, 8))


def test_many_small_jobs_of_many_threads() -> None:
    """Threads that come late to a job, or find none left, never take another's part."""
    rng = np.random.default_rng(3)
    matrix = _matrix(rng, (640, 1024), 8, 64, mx.float32)
    x = mx.array(rng.normal(size=(1, 1024)).astype(np.float32))
    expected = _mlx_ops.quantized_linear(_mlx_ops.Processor("portable", 1, 0), x, *matrix, group_size=64, bits=8)
    for spin_us in (0, 50):
        many = _mlx_ops.Processor("portable", 7, spin_us)
        ys = [_mlx_ops.quantized_linear(many, x, *matrix, group_size=64, bits=8) for _ in range(300)]
        assert all(mx.array_equal(y, expected).item() for y in ys)


# --- experts --------------------------------------------------------------------------------------------------------

HIDDEN, INNER = 192, 96


def quantized_experts(
    rng: np.random.Generator, n: int, bits: Sequence[int], dtype: mx.Dtype
) -> tuple[list[Quantized], _mlx_ops.ExpertMlp]:
    """Gate, up and down of n experts, stacked, and what computes them; the slots begin at 5."""
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    stacks, projections = [], []
    for (n_out, n_in), b in zip(shapes, bits, strict=True):
        w = mx.array(rng.normal(size=(n, n_out, n_in)).astype(np.float32))
        q, scales, biases = mx.quantize(w, group_size=32, bits=b)
        stack = (q, scales.astype(dtype), biases.astype(dtype))
        mx.eval(stack)
        stacks.append(stack)
        pieces = [(_address(array), array.nbytes // n) for array in stack]
        projections.append(_mlx_ops.Projection(pieces, n_out, n_in, 32, b, DTYPE_NAMES[dtype]))
    return stacks, _mlx_ops.ExpertMlp([_mlx_ops.ExpertRegion(5, n, *projections)])


def _address(array: mx.array) -> int:
    """Of an evaluated array's data, which stays where it is as long as the array lives."""
    view = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return int(np.asarray(view, copy=False).ctypes.data)


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("bits", [(8, 8, 8), (4, 4, 6), (3, 5, 2)])
def test_experts_are_what_mlx_computes(
    processor: _mlx_ops.Processor, bits: tuple[int, int, int], dtype: mx.Dtype
) -> None:
    rng = np.random.default_rng(sum(bits))
    stacks, experts = quantized_experts(rng, 7, bits, dtype)
    x = mx.array(rng.normal(size=(6, HIDDEN)).astype(np.float32))
    chosen = np.stack([rng.permutation(7)[:3] for _ in range(6)])
    y = _mlx_ops.expert_mlp(processor, experts, x, mx.array((chosen + 5).astype(np.int32)))
    for row in range(6):
        for k in range(3):
            gate, up, down = (_of(stack, int(chosen[row, k])) for stack in stacks)
            _check_expert(processor, y[row, k], x[row : row + 1], (gate, up, down), bits)
    alone = mx.stack(
        [mx.stack([_one(processor, experts, x[row], int(chosen[row, k]) + 5) for k in range(3)]) for row in range(6)]
    )
    assert mx.array_equal(y, alone), "a pair's bits depend on what is computed with it"


def _of(stack: Quantized, expert: int) -> Quantized:
    w, scales, biases = stack
    return w[expert], scales[expert], biases[expert]


def _check_expert(
    processor: _mlx_ops.Processor, y: mx.array, x: mx.array, expert: tuple[Quantized, ...], bits: tuple[int, ...]
) -> None:
    gate, up, down = expert
    inner = nn.silu(_by_mlx(x, gate, 32, bits[0])) * _by_mlx(x, up, 32, bits[1])
    wide = np.array(x, np.float64)
    gates = _exact(wide, gate, 32, bits[0])
    with np.errstate(over="ignore"):
        exact = gates / (1 + np.exp(-gates)) * _exact(wide, up, 32, bits[1])
    _check(processor, y, _by_mlx(inner, down, 32, bits[2])[0], _exact(exact, down, 32, bits[2])[0])


def _one(processor: _mlx_ops.Processor, experts: _mlx_ops.ExpertMlp, row: mx.array, slot: int) -> mx.array:
    y = _mlx_ops.expert_mlp(processor, experts, row[None], mx.array([[slot]], mx.int32))
    return y[0, 0]


def test_large_and_small_gates(processor: _mlx_ops.Processor) -> None:
    """SwiGLU where e ** x overflows or vanishes: no NaN, and the limits of the function."""
    rng = np.random.default_rng(0)
    stacks, experts = quantized_experts(rng, 1, (8, 8, 8), mx.float32)
    x = mx.array(rng.normal(size=(1, HIDDEN)).astype(np.float32)) * 1e3
    y = _mlx_ops.expert_mlp(processor, experts, x, mx.array([[5]], mx.int32))
    gate, up, down = (_of(stack, 0) for stack in stacks)
    _check_expert(processor, y[0, 0], x, (gate, up, down), (8, 8, 8))


def test_no_slot_is_zero_and_a_wrong_one_an_error(processor: _mlx_ops.Processor) -> None:
    _, experts = quantized_experts(np.random.default_rng(0), 2, (8, 8, 8), mx.float32)
    x = mx.ones((1, HIDDEN))
    y = _mlx_ops.expert_mlp(processor, experts, x, mx.array([[-1, 5]], mx.int32))
    assert not y[0, 0].any() and y[0, 1].any()
    for slot in (4, 7):
        with pytest.raises(RuntimeError, match=f"slot {slot} is in no region"):
            mx.eval(_mlx_ops.expert_mlp(processor, experts, x, mx.array([[slot]], mx.int32)))


# --- what cannot be computed ----------------------------------------------------------------------------------------


def test_wrong_input_is_refused(processor: _mlx_ops.Processor) -> None:
    w, scales, biases = _matrix(np.random.default_rng(0), (8, 128), 8, 64, mx.float32)
    x = mx.ones((2, 128))
    for args in (
        (x.astype(mx.bfloat16), w, scales, biases, 64, 8),
        (x, w, scales, biases.astype(mx.bfloat16), 64, 8),
        (mx.ones((2, 64)), w, scales, biases, 64, 8),
        (x, w, scales[:, :1], biases, 64, 8),
        (x, w, scales, biases, 64, 7),
        (x, w, scales, biases, 48, 8),
        (x, w, scales, biases, 64, 4),
    ):
        with pytest.raises(ValueError, match=r"linear|no kernel"):
            _mlx_ops.quantized_linear(processor, *args)


def test_kernels_that_cannot_run_are_named() -> None:
    with pytest.raises(ValueError, match=r"it can run .*portable, scalar"):
        _mlx_ops.Processor("sse9", 1, 0)
