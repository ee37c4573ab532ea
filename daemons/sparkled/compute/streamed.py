"""Streamed experts: the module that takes the place of an mlx-lm SwitchGLU and computes the same thing.

The switch's own code runs on a compact copy of just the experts that this step routes to: its projections are given the
arrays of those slots, the indices are renumbered, and nothing else differs. So every family whose experts live in a
switch streams by the same mechanism, and float32 results on the CPU equal the resident model's bit for bit.

Where Sparkle's own kernels compute the experts (CPU), a small step is one lazy graph: look-up, waiting and release
happen while it runs, on MLX's thread (native/src/expert_stream.h), and Python has a hand in it only for what is absent.
Elsewhere the host reads each layer's routing first.

Where some experts are missing in a small step, those that are there are computed while the disk reads the others. Every
(row, expert) product has its own order of accumulation, so the split changes no bit of the result.

INVARIANT: slots are released only after every array built from them has been evaluated or dropped.
INVARIANT: nothing is held while the prefetch daemon is waited for (two clients cannot block each other).
INVARIANT: while a step's graph runs the model thread waits for it, so the PoolClient is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from sparkle import _mlx_ops
from sparkle.errors import Cancelled, StorageError
from sparkle.manifest import ExpertLayer, LayoutClass
from sparkle.pool_client import Fetch, PoolClient
from sparkle.trace import Origin
from sparkled.compute import cpu
from sparkled.compute.slots import PoolArrays

Indices = NDArray[np.int64]
Router = Callable[[mx.array], mx.array]  # a layer's gate: (…, hidden) -> (…, n_experts)
Ahead = tuple[ExpertLayer, mx.array]  # a later layer, and its router's logits

# mlx-lm's switches sort their pairs from this many on, and a GPU's kernels for sorted pairs round differently.
SORTED_FROM = 64


class Demand:
    """What a step's graph asks for while it runs: the waiting calls of a PoolClient. A _mlx_ops.Provider.

    follow: called when the pool may have been mapped anew.
    """

    def __init__(
        self, client: PoolClient, origin: Origin, should_abort: Callable[[], bool], follow: Callable[[], None]
    ) -> None:
        self._client = client
        self._origin = origin
        self._should_abort = should_abort
        self._follow = follow
        self._fetch: Fetch | None = None

    def look_up(self, layer: int, experts: list[int]) -> list[int]:
        slots = self._client.look_up(layer, experts, self._origin, self._should_abort)
        self._follow()
        return slots

    def fetch(self, layer: int, experts: list[int]) -> None:
        self._fetch = self._client.fetch(layer, experts)

    def wait(self) -> list[int]:
        fetch, self._fetch = self._fetch, None
        if fetch is None:
            raise RuntimeError("a wait without a fetch")
        slots = self._client.wait(fetch, self._should_abort)
        self._follow()
        return slots

    def hint(self, layer: int, experts: list[int]) -> None:
        self._client.hint(layer, experts, "router")

    def abandon(self) -> None:
        """Take back what was asked for and will not be waited for."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            self._client.abandon(fetch)


class ExpertSource:
    """Gives the layers of one step their experts. Used by the model thread alone.

    A step is bracketed by `begin` and `finish` (or `abandon` after an exception).

    processor: computes the experts where they lie, if it can; None: MLX does, on copies.
    """

    def __init__(self, client: PoolClient, arrays: PoolArrays, processor: _mlx_ops.Processor | None = None) -> None:
        self.processor = processor
        self._client = client
        self._arrays = arrays
        self._stream = None if processor is None else _mlx_ops.ExpertStream(processor)
        self._generation = -1
        self._held: list[int] = []
        self._output: mx.array | None = None
        self._demand: Demand | None = None
        self._should_abort: Callable[[], bool] = lambda: False
        self._origin = Origin(0)
        self._wants_hints = False

    def begin(self, should_abort: Callable[[], bool], stream: int, ids: Sequence[int]) -> None:
        """`stream` tells conversations apart; `ids` are the tokens of the step's rows."""
        self._origin = Origin(self._origin.step + 1, stream, len(ids), ids[-1])
        self._should_abort = should_abort
        self._wants_hints = self._client.native.wants_hints
        self._demand = Demand(self._client, self._origin, should_abort, self._follow)
        if self._stream is not None:
            self._follow()
            self._stream.begin(*self._origin.words(), self._demand)

    def finish(self) -> None:
        """End a step: complete the last layer and let go of its slots. Raises what went wrong in the step's graph: what
        was evaluated is worth nothing then."""
        self.release()
        self._check()
        self._end()

    def abandon(self) -> None:
        """End a step that failed: what was built from the slots is dropped, never evaluated."""
        self._output = None
        if self._demand is not None:
            self._demand.abandon()
        self.release()
        self._end()

    def _end(self) -> None:
        self._demand = None
        if self._stream is not None:
            self._stream.end()

    def _check(self) -> None:
        if self._stream is not None:
            self._stream.check()

    def _follow(self) -> None:
        """Show the stream the pool that is mapped now."""
        if self._stream is not None and self._generation != self._client.generation:
            self._stream.attach(self._client.native.share(), self._arrays.all_experts())
            self._generation = self._client.generation

    def stream(
        self, layer: ExpertLayer, layout: LayoutClass, x: mx.array, indices: mx.array, ahead: Sequence[Ahead]
    ) -> mx.array:
        """Return (n_rows, top_k, hidden), lazy, of x (n_rows, hidden) and indices (n_rows, top_k); see ExpertStream.

        ahead: later layers, and their routers' logits for x.
        """
        if self._stream is None:
            raise RuntimeError("no processor computes experts in a stream")
        forecasts = [(later.index, later.top_k, logits) for later, logits in ahead]
        n_out = cpu.n_outputs(layout)
        return _mlx_ops.streamed_mlp(
            self._stream, layer.index, layer.layout, n_out, x, indices.astype(mx.uint32), forecasts
        )

    @property
    def wants_hints(self) -> bool:
        """Whether the prefetch daemon has use for guesses in this step; a prompt's rows use nearly every expert."""
        return self._wants_hints and self._origin.rows * 2 < SORTED_FROM

    def route(self, indices: mx.array, guesses: Sequence[mx.array]) -> tuple[Indices, list[Any]]:
        """Read a layer's routing, and guesses with it, on the host: the one wait per layer, which also completes the
        layer before."""
        if self._should_abort():
            raise Cancelled("cancelled within a step")
        mx.eval(indices, *guesses, *([] if self._output is None else [self._output]))
        self._check()
        return np.array(indices).astype(np.int64), [np.array(g) for g in guesses]

    def look_up(self, layer: ExpertLayer, experts: list[int]) -> NDArray[np.int64]:
        """Release the layer before, and hold of `experts` (distinct) what is there: slots, -1 where nothing is."""
        self.release()
        self._held = self._client.look_up(layer.index, experts, self._origin, self._should_abort)
        return np.asarray(self._held)

    def fetch(self, layer: ExpertLayer, experts: list[int]) -> None:
        """Ask for experts; `wait` follows. What is held must be evaluated and released in between."""
        self._running.fetch(layer.index, experts)

    def wait(self) -> NDArray[np.int64]:
        """Return the held slots of what was asked for last."""
        if self._held:
            raise RuntimeError("a wait while slots are held")
        self._held = self._running.wait()
        return np.asarray(self._held)

    @property
    def _running(self) -> Demand:
        if self._demand is None:
            raise RuntimeError("experts are asked for outside of a step")
        return self._demand

    def hint(self, layer: int, logits: NDArray[np.float32], n: int) -> None:
        """Tell the prefetch daemon which of a later layer's likeliest `n` experts are not in the pool."""
        ranked = np.argsort(-logits.reshape(-1), kind="stable")[:n].tolist()
        if absent := self._client.native.absent(layer, ranked):
            self._client.hint(layer, absent, "router")

    def take(self, layer: ExpertLayer, slots: NDArray[np.int64]) -> tuple[list[mx.array], NDArray[np.int64]]:
        """Return each piece's rows of held `slots`; see PoolArrays.take."""
        return self._arrays.take(layer.layout, slots)

    def experts(self, layer: ExpertLayer) -> _mlx_ops.ExpertMlp:
        """What computes a layer's experts in held slots."""
        return self._arrays.experts(layer.layout)

    def built(self, output: mx.array) -> None:
        """`output` is what was built from the slots held now."""
        self._output = output

    def release(self) -> None:
        """Evaluate what was built from the held slots, and let go of them."""
        if self._output is not None:
            mx.eval(self._output)
            self._output = None
        held, self._held = self._held, []
        self._client.release(held)


class StreamedExperts(nn.Module):  # type: ignore[misc]  # mlx is untyped
    """Takes the place of `switch`, an mlx-lm SwitchGLU (or alike) whose weights were never loaded.

    `_ahead`: routers of the MoE layers that follow, by store layer, set by the loader. Given this layer's input they
    guess, ahead of time, what those layers will choose.
    """

    def __init__(self, switch: nn.Module, layer: ExpertLayer, layout: LayoutClass, source: ExpertSource) -> None:
        super().__init__()
        self._processor = source.processor if cpu.can_compute(switch, layout) else None
        self._switch = switch  # the underscore keeps it out of parameters()
        self._layer = layer
        self._layout = layout
        self._source = source
        self._ahead: list[tuple[ExpertLayer, Router]] = []
        self._targets = [_target(switch, piece.name, layer) for piece in layout.pieces]
        _drop_weights(switch, self._targets)

    def look_ahead(self, routers: Sequence[tuple[ExpertLayer, Router]]) -> None:
        self._ahead = list(routers)

    def __call__(self, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """x: (…, hidden); indices: (…, top_k), ids in [0, n_experts). Returns (…, top_k, hidden)."""
        source, layer = self._source, self._layer
        ahead = self._ahead if source.wants_hints else []
        if self._processor is not None and indices.size < SORTED_FROM and not (args or kwargs):
            rows, top = x.reshape(-1, x.shape[-1]), indices.reshape(-1, indices.shape[-1])
            guessed = [(later, router(x)) for later, router in ahead]
            return source.stream(layer, self._layout, rows, top, guessed).reshape(*indices.shape, -1)
        routing, guesses = source.route(indices, [router(x)[..., -1, :] for _, router in ahead])
        experts, compact = np.unique(routing, return_inverse=True)
        compact = compact.reshape(routing.shape)
        slots = source.look_up(layer, experts.tolist())
        is_missing = slots < 0
        if not is_missing.any():
            self._hint(guesses)
            output = self._compute(x, slots, compact, *args, **kwargs)
        elif is_missing.all() or routing.size >= SORTED_FROM or args or kwargs:
            source.release()
            source.fetch(layer, experts.tolist())
            self._hint(guesses)
            output = self._compute(x, source.wait(), compact, *args, **kwargs)
        else:
            output = self._hits_first(x, experts, compact, slots, guesses)
        source.built(output)
        return output

    def _hits_first(
        self, x: mx.array, experts: Indices, compact: Indices, slots: NDArray[np.int64], guesses: list[Any]
    ) -> mx.array:
        """Compute what is there while the rest is read, as (row, expert) pairs; then the rest, and put all in order."""
        source, is_missing = self._source, slots < 0
        source.fetch(self._layer, experts[is_missing].tolist())
        self._hint(guesses)
        top_k = compact.shape[-1]
        pairs = compact.reshape(-1)  # of row i // top_k and, by its place in `experts`, an expert
        x_rows = x.reshape(-1, x.shape[-1])
        early, late = np.flatnonzero(~is_missing[pairs]), np.flatnonzero(is_missing[pairs])
        place = np.where(is_missing, np.cumsum(is_missing), np.cumsum(~is_missing)) - 1
        first = self._compute(x_rows[mx.array(early // top_k)], slots[~is_missing], place[pairs[early]][:, None])
        source.built(first)
        source.release()  # evaluates `first`
        second = self._compute(x_rows[mx.array(late // top_k)], source.wait(), place[pairs[late]][:, None])
        order = np.argsort(np.concatenate([early, late]))
        output = mx.concatenate([first, second])[mx.array(order)]
        return output.reshape(*compact.shape, output.shape[-1])

    def _compute(self, x: mx.array, slots: NDArray[np.int64], local: Indices, *args: Any, **kwargs: Any) -> mx.array:
        """Run the switch over the experts in held `slots`, named by `local` (…, top_k). Returns (…, top_k, hidden)."""
        if self._processor is not None:
            experts, places = self._source.experts(self._layer), mx.array(slots[local].astype(np.int32))
            rows, top = x.reshape(-1, x.shape[-1]), places.reshape(-1, places.shape[-1])
            return _mlx_ops.expert_mlp(self._processor, experts, rows, top).reshape(*local.shape, -1)
        pieces, place = self._source.take(self._layer, slots)
        for (projection, name), array in zip(self._targets, pieces, strict=True):
            projection[name] = array
        output: mx.array = self._switch(x, mx.array(place[local].astype(np.uint32)), *args, **kwargs)
        for projection, name in self._targets:
            del projection[name]  # else 48 layers keep their last experts alive outside the pool's budget
        return output

    def _hint(self, guesses: list[Any]) -> None:
        for (layer, _), logits in zip(self._ahead, guesses, strict=False):
            self._source.hint(layer.index, logits, layer.top_k)


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
