"""Contract of native/src/mlx_ops_module.cpp. Import mlx.core first."""

from collections.abc import Sequence
from typing import Protocol

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

class Provider(Protocol):
    """Gets experts that are not in the pool. Called by MLX's thread, while the model thread waits for it."""

    def look_up(self, layer: int, experts: list[int]) -> list[int]:
        """Hold of `experts` what is there (-1 where nothing is) and tell the policy, waiting while the ring is full."""
    def fetch(self, layer: int, experts: list[int]) -> None:
        """Ask for experts, and go on."""
    def wait(self) -> list[int]:
        """The held slots of what was asked for. If the pool is another one by then, it was attached to the stream."""
    def hint(self, layer: int, experts: list[int]) -> None:
        """Tell what a later layer will probably want."""

class ExpertStream:
    """Looks experts up in the pool, waits for those that are absent and computes them, while a step's graph runs."""

    def __init__(self, processor: Processor) -> None: ...
    def attach(self, client: object, experts: Sequence[ExpertMlp | None]) -> None:
        """client: PoolClient.share() of the pool now mapped; experts: by layout class, None where not computed here."""
    def begin(self, step: int, stream: int, rows: int, token: int, provider: Provider) -> None:
        """Start a step; the provider is kept until `end`."""
    def check(self) -> None:
        """Raise what went wrong since `begin`: from then on the results were NaN. Call it after each evaluation."""
    def end(self) -> None: ...

def streamed_mlp(
    stream: ExpertStream,
    layer: int,
    layout: int,
    n_out: int,
    x: mx.array,
    indices: mx.array,
    forecasts: Sequence[tuple[int, int, mx.array]],
) -> mx.array:
    """x (n_rows, hidden) float32, indices (n_rows, top_k) uint32, experts of `layer`: (n_rows, top_k, n_out) float32.

    forecasts: (later layer, n, router logits (…, n_experts) float32): the last row's `n` likeliest are hinted.
    To be evaluated between `begin` and `end`. CPU backend only.
    """
