"""Streamed experts: the module that takes the place of an mlx-lm SwitchGLU and computes the same thing.

The switch's own code runs on a compact copy of just the experts that this step routes to: its projections are given the
arrays of those slots, the indices are renumbered, and nothing else differs. So every family whose experts live in a
switch streams by the same mechanism, and float32 results on the CPU equal the resident model's bit for bit.

INVARIANT: slots are released only after every array built from them has been evaluated or dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from sparkle.errors import Cancelled, StorageError
from sparkle.manifest import ExpertLayer, LayoutClass
from sparkle.pool_client import PoolClient
from sparkled.compute.slots import PoolArrays


class ExpertSource:
    """Gives the layers of one step their experts. Used by the model thread alone.

    A step is bracketed by `begin` and `finish` (or `abandon` after an exception).
    """

    def __init__(self, client: PoolClient, arrays: PoolArrays) -> None:
        self._client = client
        self._arrays = arrays
        self._held: list[int] = []
        self._output: mx.array | None = None
        self._should_abort: Callable[[], bool] = lambda: False
        self.step = 0

    def begin(self, should_abort: Callable[[], bool]) -> None:
        self.step += 1
        self._should_abort = should_abort

    def finish(self) -> None:
        """End a step: complete the last layer and let go of its slots."""
        self._release()

    def abandon(self) -> None:
        """End a step that failed: what was built from the slots is dropped, never evaluated."""
        self._output = None
        self._release()

    def route(self, indices: mx.array) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Read a layer's routing on the host: the one wait per layer, which also completes the layer before."""
        if self._should_abort():
            raise Cancelled("cancelled within a step")
        if self._output is not None:
            mx.eval(indices, self._output)
        return np.array(indices).astype(np.int64)

    def take(
        self, layer: ExpertLayer, experts: list[int]
    ) -> tuple[list[mx.array], np.ndarray[Any, np.dtype[np.int64]]]:
        """Hold the slots of `experts` (distinct), releasing those of the layer before; see PoolArrays.take."""
        self._release()
        self._held = self._client.acquire(layer.index, experts, self.step, self._should_abort)
        return self._arrays.take(layer.layout, self._held)

    def built(self, output: mx.array) -> None:
        """`output` is what was built from the slots held now."""
        self._output = output

    def _release(self) -> None:
        if self._output is not None:
            mx.eval(self._output)
            self._output = None
        held, self._held = self._held, []
        self._client.release(held)


class StreamedExperts(nn.Module):  # type: ignore[misc]  # mlx is untyped
    """Takes the place of `switch`, an mlx-lm SwitchGLU (or alike) whose weights were never loaded."""

    def __init__(self, switch: nn.Module, layer: ExpertLayer, layout: LayoutClass, source: ExpertSource) -> None:
        super().__init__()
        self._switch = switch  # the underscore keeps it out of parameters()
        self._layer = layer
        self._source = source
        self._targets = [_target(switch, piece.name, layer) for piece in layout.pieces]
        _drop_weights(switch, self._targets)

    def __call__(self, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """x: (…, hidden); indices: (…, top_k), ids in [0, n_experts). Returns (…, top_k, hidden)."""
        routing = self._source.route(indices)
        experts, compact = np.unique(routing, return_inverse=True)
        pieces, place = self._source.take(self._layer, experts.tolist())
        for (projection, name), array in zip(self._targets, pieces, strict=True):
            projection[name] = array
        local = mx.array(place[compact].reshape(routing.shape).astype(np.uint32))
        output: mx.array = self._switch(x, local, *args, **kwargs)
        for projection, name in self._targets:
            del projection[name]  # else 48 layers keep their last experts alive outside the pool's budget
        self._source.built(output)
        return output


def _target(switch: nn.Module, piece_name: str, layer: ExpertLayer) -> tuple[nn.Module, str]:
    path, _, name = piece_name.rpartition(".")
    module = switch
    for part in path.split("."):
        if part not in module:
            raise StorageError(
                f"{layer.file}: {layer.module} has no {path!r} in mlx-lm's model; prepare the store again"
            )
        module = module[part]
    return module, name


def _drop_weights(switch: nn.Module, targets: list[tuple[nn.Module, str]]) -> None:
    """Remove the random, never evaluated weights that mlx-lm's constructors made, and check that none is left."""
    for projection, name in targets:
        if name in projection:
            del projection[name]
    left = [k for projection, _ in targets for k, v in projection.items() if isinstance(v, mx.array)]
    if left:
        raise StorageError(f"the store has no records for expert weights {sorted(set(left))}; prepare it again")
