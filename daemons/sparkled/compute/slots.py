"""The pool's slots as this backend sees them: arrays whose rows are slots.

Owns MLX arrays over the regions of a PoolClient. On the CPU (sparkle._mlx_ops) and on Metal (mx.asarray) they adopt the
shared memory without a copy; a backend that can't adopt host memory (CUDA) copies the slots that a step takes. Never
evaluates: `take` is lazy, so the caller must hold the slots until what it builds has been evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from sparkle import _mlx_ops
from sparkle.errors import PoolError
from sparkle.manifest import Piece
from sparkle.pool_client import PoolClient
from sparkle.regions import Region
from sparkled.compute import cpu

_DTYPES = {
    "U8": mx.uint8,
    "U16": mx.uint16,
    "U32": mx.uint32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
}
_CARRIER = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # NumPy has no bfloat16: floats travel as unsigned integers
_FLOATS = ("F16", "BF16", "F32")

# rows of one piece's array, by slot numbers within the region
Rows = Callable[[npt.NDArray[np.uint32]], mx.array]


class PoolArrays:
    """Arrays over all regions, made anew whenever the client mapped the pool anew.

    widen_to: dtype for floating pieces (scales, biases) of taken slots; None keeps the checkpoint's. MLX kernels want
    the scales in the activations' dtype, and converting a whole pool at every call costs more than the step itself.
    """

    def __init__(self, client: PoolClient, widen_to: Any | None) -> None:
        self._client = client
        self._widen_to = widen_to
        self._generation = -1
        self._rows: list[list[Rows]] = []
        self._experts: dict[int, _mlx_ops.ExpertMlp] = {}
        self.adoption = ""

    def take(self, layout: int, slots: npt.ArrayLike) -> tuple[list[mx.array], npt.NDArray[np.int64]]:
        """Return each piece's array (n, *shape) of `slots`, and where in it each slot went: (n,) int64.

        All slots belong to layout class `layout` and are held by the caller.
        """
        if self._generation != self._client.generation:
            self._open()
        wanted = np.asarray(slots, np.int64)
        parts: list[list[mx.array]] = []
        place = np.empty(len(wanted), np.int64)
        n_placed = 0
        for region, rows in zip(self._client.regions, self._rows, strict=True):
            first = region.spec.first_slot
            inside = np.flatnonzero((wanted >= first) & (wanted < first + region.spec.n_slots))
            if len(inside) == 0:
                continue
            if region.spec.layout != layout:
                raise PoolError(f"slot {wanted[inside[0]]} is not of layout class {layout}; restart the daemons")
            local = (wanted[inside] - first).astype(np.uint32)
            parts.append([self._widened(take(local), p) for take, p in zip(rows, region.layout.pieces, strict=True)])
            place[inside] = np.arange(n_placed, n_placed + len(inside))
            n_placed += len(inside)
        if n_placed != len(wanted):
            raise PoolError("a slot lies outside every region of the pool; restart the daemons")
        return [p[0] if len(p) == 1 else mx.concatenate(list(p)) for p in zip(*parts, strict=True)], place

    def experts(self, layout: int) -> _mlx_ops.ExpertMlp:
        """What computes the experts of a layout class where they lie; see cpu.can_compute."""
        if self._generation != self._client.generation:
            self._open()
        if layout not in self._experts:
            self.adoption = "in place"
            self._experts[layout] = cpu.expert_mlp([r for r in self._client.regions if r.spec.layout == layout])
        return self._experts[layout]

    def all_experts(self) -> list[_mlx_ops.ExpertMlp | None]:
        """`experts` of every layout class; None for those whose records no kernel reads, or that have no region."""
        of_class = {region.spec.layout: region.layout for region in self._client.regions}
        return [
            self.experts(i) if i in of_class and cpu.can_read(of_class[i]) else None
            for i in range(max(of_class, default=-1) + 1)
        ]

    def _widened(self, array: mx.array, piece: Piece) -> mx.array:
        return array.astype(self._widen_to) if self._widen_to is not None and piece.dtype in _FLOATS else array

    def _open(self) -> None:
        self._rows = [[self._rows_of(region, i) for i in range(len(region.pieces))] for region in self._client.regions]
        self._experts = {}
        self._generation = self._client.generation

    def _rows_of(self, region: Region, index: int) -> Rows:
        view, piece = region.pieces[index], region.layout.pieces[index]
        shape = (region.spec.n_slots, *piece.shape)
        if mx.default_device().type == mx.DeviceType.cpu:
            self.adoption = "in place"
            adopted = _mlx_ops.adopt(view.reshape(-1), shape, piece.dtype)
            return lambda slots: mx.take(adopted, mx.array(slots), axis=0)
        if mx.metal.is_available():
            self.adoption = "in place"
            adopted = _adopt_on_metal(view, shape, piece)
            return lambda slots: mx.take(adopted, mx.array(slots), axis=0)
        self.adoption = "copied to the device"
        dtype = _DTYPES[piece.dtype]
        typed = view.reshape(-1).view(_CARRIER[dtype.size]).reshape(shape)
        return lambda slots: mx.array(typed[slots]).view(dtype)


def _adopt_on_metal(view: npt.NDArray[np.uint8], shape: tuple[int, ...], piece: Piece) -> mx.array:
    """Not run by us: no Metal machine. Checked at run time: the array must point at our memory."""
    dtype = _DTYPES[piece.dtype]
    typed = view.reshape(-1).view(_CARRIER[dtype.size]).reshape(shape)
    adopted = mx.asarray(typed, copy=False)
    if np.asarray(adopted).ctypes.data != view.ctypes.data:
        raise PoolError(
            "Metal copied the pool instead of adopting it; please report this with the output of sparkle-ctl"
        )
    return adopted.view(dtype)
