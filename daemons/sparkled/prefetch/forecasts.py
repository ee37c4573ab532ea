"""Forecasts: which experts a layer will ask for before it does, and in what order to read them.

Owns what predictors remember and the queue of wanted experts. Never reads or places anything: the daemon takes one
forecast after the other while the disk is idle. A forecast lives until its layer's turn; then it is forgotten.

    router      a later layer's router on the hidden state of now; computed by the client, which sends HintExperts
    token       what this token used in that layer the last time it came up
    previous    what the same conversation's last step used in that layer (with drafts: the last verify pass)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from sparkle.policy import Key
from sparkle.trace import Event

PREDICTORS = ("router", "token", "previous")
LAYERS_AHEAD = 2  # what is read for a layer further away comes in time anyway, and is wrong more often
MAX_TOKENS = 4096  # of one model's routing kept: about 1 kB each for 48 layers of 10
MAX_STREAMS = 64


class _Memory:
    """The last routing under each of the latest `limit` names (tokens, conversations)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._routing: OrderedDict[int, dict[int, list[int]]] = OrderedDict()

    def observe(self, name: int, event: Event) -> None:
        if name not in self._routing:
            self._routing[name] = {}
            if len(self._routing) > self._limit:
                self._routing.popitem(last=False)
        self._routing.move_to_end(name)
        self._routing[name][event.layer] = event.experts

    def recall(self, name: int, layer: int) -> list[int]:
        return self._routing.get(name, {}).get(layer, [])


class Forecasts:
    """`next_layers(layer)` are the layers of the same client whose turn follows, nearest first."""

    def __init__(self, next_layers: Callable[[int], Sequence[int]]) -> None:
        self._next_layers = next_layers
        self._by_token = _Memory(MAX_TOKENS)
        self._by_stream = _Memory(MAX_STREAMS)
        self._wanted: dict[int, list[int]] = {}
        self.active: str | None = None

    def observe(self, event: Event) -> None:
        """Learn from a step's use of a layer; what was wanted for it is forgotten, its turn has come."""
        self._wanted.pop(event.layer, None)
        if event.rows == 1:
            self._forecast(event)  # first: the memory of this token's layers ahead is that of its last time
            self._by_token.observe(event.token, event)
            self._by_stream.observe(event.stream, event)

    def _forecast(self, event: Event) -> None:
        if self.active not in ("token", "previous"):
            return
        memory, name = (self._by_token, event.token) if self.active == "token" else (self._by_stream, event.stream)
        for layer in self._next_layers(event.layer)[:LAYERS_AHEAD]:
            self.hint(self.active, layer, memory.recall(name, layer))

    def hint(self, predictor: str, layer: int, experts: Sequence[int]) -> None:
        """`predictor` expects `experts` of `layer`, likeliest first; taken if it is the one that is active."""
        if predictor == self.active:
            self._wanted[layer] = list(experts)

    def take(self) -> Iterator[Key]:
        """Wanted experts, those of the nearest layer first; each is handed out once."""
        while self._wanted:
            layer = next(iter(self._wanted))
            experts = self._wanted[layer]
            if not experts:
                del self._wanted[layer]
                continue
            yield layer, experts.pop(0)
