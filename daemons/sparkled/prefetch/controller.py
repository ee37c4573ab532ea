"""Whether anybody's forecasts are worth their reads: the daemon tries it on the running workload, against itself.

Pure bookkeeping over the time that each token took. A trial lets the present choice and a challenger take turns of
WINDOW tokens in the order A B B A, so that a drift of the machine hits both alike; what counts is the ratio within each
pair. A challenger must be faster beyond doubt; doing nothing wins every tie.

Owns no predictor: it names the one that should be active, and says why.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

WINDOW = 16  # tokens: long against a single slow read, short against a change of topic
MIN_PAIRS, MAX_PAIRS = 4, 12
DOUBT = 2.0  # standard errors: 95 %
CLEARLY_SLOWER = 0.02  # a challenger that is surely slower than this is not tried to the end
FIRST_REST, LONGEST_REST = 512, 16384  # tokens between trials: what trials may cost stays below 1 %
MIN_STALL_FRAC = 0.02  # below this share of the time there is nothing to win
CHANGED = 1.5  # factor by which stalls must have changed for the workload to count as another
OUTLIER = 4.0  # times the median: a pause of the machine, not a token's cost


class Controller:
    """`active`: the predictor whose forecasts are read now, or None. `mode`: auto, off, or a predictor's name."""

    def __init__(self, mode: str, predictors: Sequence[str]) -> None:
        self._is_auto = mode == "auto"
        self._choice: str | None = None if mode in ("auto", "off") else mode
        self._predictors = list(predictors)
        self.active = self._choice
        self._decision = "nothing tried yet" if self._is_auto else f"set to {mode}"
        self.trials = 0
        self._rest = FIRST_REST
        self._n_rested = FIRST_REST - WINDOW  # the first trial begins as soon as there is something to win
        self._next = 0
        self._challenger: str | None = None
        self._is_trial = False
        self._window: list[float] = []
        self._means: list[float] = []
        self._recent: deque[tuple[float, float]] = deque(maxlen=4 * WINDOW)
        self._stall_at_decision = 0.0

    @property
    def reason(self) -> str:
        """What was decided last and why; while a trial runs, of what it is, and then what was decided before."""
        if not self._is_trial:
            return self._decision
        n_pairs = len(self._means) // 2
        arms = f"{self._challenger or 'off'} against {self._choice or 'off'}"
        return f"trial of {arms}, {n_pairs} of {MIN_PAIRS} to {MAX_PAIRS} pairs done; before: {self._decision}"

    def on_token(self, seconds: float, stall_s: float) -> None:
        """A decoded token took `seconds`, `stall_s` of them without its experts."""
        if not self._is_auto:
            return
        self._recent.append((seconds, stall_s))
        if self._is_trial:
            self._window.append(seconds)
            if len(self._window) == WINDOW:
                self._end_window()
            return
        self._n_rested += 1
        if self._n_rested >= self._rest or (self._n_rested >= FIRST_REST and self._has_changed()):
            self._begin_trial()

    # --- trials ----------------------------------------------------------------------------------------------------

    def _begin_trial(self) -> None:
        if self._has_changed():
            self._rest = FIRST_REST
        if self._choice is None and self._stall_frac() < MIN_STALL_FRAC:
            self._decision = f"off: stalls are {self._stall_frac():.1%} of the time, nothing to win"
            self._n_rested = self._rest - WINDOW  # looks again soon: this costs nothing
            return
        arms = [arm for arm in (None, *self._predictors) if arm != self._choice]
        # what runs is put to the test against nothing each time; with nothing running, predictors take turns
        self._challenger = None if self._choice is not None else arms[self._next % len(arms)]
        self._next += 1
        self._is_trial, self._means, self._window = True, [], []
        self.trials += 1
        self.active = self._choice

    def _end_window(self) -> None:
        middle = sorted(self._window)[WINDOW // 2]
        kept = [s for s in self._window if s <= OUTLIER * middle]
        self._means.append(sum(kept) / len(kept))
        self._window = []
        n = len(self._means)
        self.active = self._challenger if n % 4 in (1, 2) else self._choice
        if n % 2 == 0 and n // 2 >= MIN_PAIRS:
            self._judge(_ratios(self._means))

    def _judge(self, ratios: list[float]) -> None:
        """End the trial if it is decided. ratios: log(challenger's time / present choice's) of each pair."""
        n = len(ratios)
        mean = sum(ratios) / n
        doubt = DOUBT * math.sqrt(sum((r - mean) ** 2 for r in ratios) / (n - 1) / n)
        is_last = n >= MAX_PAIRS
        if self._challenger is None:  # to go on, what runs must be faster than nothing beyond doubt
            loses = mean - doubt > 0
            wins = not loses and (is_last or mean + doubt < 0)
        else:
            wins = mean + doubt < 0
            loses = not wins and (is_last or mean - doubt > CLEARLY_SLOWER)
        if not wins and not loses:
            return
        name, other = self._challenger or "off", self._choice or "off"
        change = f"{math.expm1(mean):+.1%} ± {math.expm1(doubt):.1%} time per token against {other}, {n} pairs"
        if wins:
            self._choice, self._rest = self._challenger, FIRST_REST
        else:
            self._rest = min(2 * self._rest, LONGEST_REST)
        verdict = "chosen" if wins else "not worth it"
        self._decision = f"{self._choice or 'off'}: {name} {verdict} ({change})"
        self.active = self._choice
        self._is_trial, self._n_rested = False, 0
        self._stall_at_decision = self._stall_frac()

    # --- workload --------------------------------------------------------------------------------------------------

    def _stall_frac(self) -> float:
        total = sum(seconds for seconds, _ in self._recent)
        return sum(stall for _, stall in self._recent) / total if total else 0.0

    def _has_changed(self) -> bool:
        now, then = self._stall_frac() + MIN_STALL_FRAC, self._stall_at_decision + MIN_STALL_FRAC
        return len(self._recent) == self._recent.maxlen and not 1 / CHANGED < now / then < CHANGED


def _ratios(means: Sequence[float]) -> list[float]:
    """log(challenger / choice) of each pair of windows; they come in the order A B, B A, A B, …"""
    pairs = zip(means[::2], means[1::2], strict=False)
    return [math.log(b / a) if i % 2 == 0 else math.log(a / b) for i, (a, b) in enumerate(pairs)]
