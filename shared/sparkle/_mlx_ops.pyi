"""Contract of native/src/mlx_ops_module.cpp. Import mlx.core first."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

def adopt(bytes: npt.NDArray[np.uint8], shape: Sequence[int], dtype: str) -> mx.array:
    """An array over `bytes`, without a copy; `dtype` by its safetensors name. CPU backend only.

    At least 8 readable bytes must lie before the data (the region's header page does).
    """

def kernel_names() -> list[str]:
    """The kernels that this processor can run, the fastest first; "scalar" computes the bits that MLX does on x86."""

class Processor:
    """Kernels, and threads that share out their work: `n_threads` in all, the caller's included.

    spin_us: how long an idle thread looks for work before it sleeps. Raises ValueError for kernels that can't be run.
    """

    def __init__(self, kernels: str, n_threads: int, spin_us: int) -> None: ...
    @property
    def kernels(self) -> str: ...
    @property
    def n_threads(self) -> int: ...

class Projection:
    """One projection of the experts in a region: `pieces` (address of slot 0, bytes to the next) of w, scales, biases.

    dtype: of scales and biases, by its safetensors name. Affine quantisation.
    """

    def __init__(
        self, pieces: Sequence[tuple[int, int]], n_out: int, n_in: int, group_size: int, bits: int, dtype: str
    ) -> None: ...

class ExpertRegion:
    def __init__(self, first_slot: int, n_slots: int, gate: Projection, up: Projection, down: Projection) -> None: ...

class ExpertMlp:
    """Experts of the form down(silu(gate(x)) * up(x)), in pool slots. The caller keeps the memory mapped."""

    def __init__(self, regions: Sequence[ExpertRegion]) -> None: ...

def quantized_linear(
    processor: Processor, x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> mx.array:
    """x (…, n_in) float32 times the transpose of a quantised (n_out, n_in): (…, n_out) float32. CPU backend only."""

def expert_mlp(processor: Processor, experts: ExpertMlp, x: mx.array, slots: mx.array) -> mx.array:
    """x (n_rows, hidden) float32, slots (n_rows, top_k) int32, -1 for none: (n_rows, top_k, hidden) float32.

    The caller holds the slots until the result has been evaluated. Zeros where there is no slot. CPU backend only.
    """
