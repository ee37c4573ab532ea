"""The daemon's trial of its own forecasts, on simulated token times: what it chooses, how soon, and what that costs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from sparkled.prefetch.controller import FIRST_REST, MAX_PAIRS, WINDOW, Controller

pytestmark = pytest.mark.unit

TOKEN_S = 0.03
NOISE = 0.1
Factor = Callable[[int, str | None], float]  # of a token's time, by its number and who predicts


def run(controller: Controller, factor: Factor, n_tokens: int, seed: int, stall_frac: float = 0.3) -> float:
    """Feed token times; return the total as a multiple of what it would have been without any forecast."""
    rng, total = random.Random(seed), 0.0
    for i in range(n_tokens):
        drift = 1 + 0.3 * (i % 1000) / 1000
        noise = rng.lognormvariate(0, NOISE) * (20 if rng.random() < 0.002 else 1)
        controller.on_token(TOKEN_S * drift * noise * factor(i, controller.active), TOKEN_S * drift * stall_frac)
        total += factor(i, controller.active)
    return total / n_tokens


def helps(name: str, by: float) -> Factor:
    return lambda i, active: 1 - by if active == name else 1.0


@pytest.mark.parametrize("seed", range(10))
def test_a_predictor_that_saves_time_is_found_and_kept(seed: int) -> None:
    controller = Controller("auto", ["router", "token"])
    cost = run(controller, lambda i, a: {"token": 0.85, "router": 1.1}.get(a or "", 1.0), 12_000, seed)
    assert controller.active == "token" or "token" in controller.reason
    assert cost < 0.9
    assert "time per token against" in controller.reason


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("slower", [0.0, 0.05, 0.1])
def test_one_that_does_not_help_costs_less_than_one_percent(seed: int, slower: float) -> None:
    controller = Controller("auto", ["router", "token", "previous"])
    cost = run(controller, lambda i, active: 1 + slower if active else 1.0, 20_000, seed)
    assert cost < 1.01
    assert controller.trials > 1


def test_one_that_stops_helping_is_dropped() -> None:
    controller = Controller("auto", ["router"])
    run(controller, helps("router", 0.2), 4_000, 1)
    assert "router: off not worth it" in controller.reason
    run(controller, lambda i, active: 1.2 if active else 1.0, 20_000, 2)
    assert controller.reason.startswith("off")
    assert controller.active is None


def test_nothing_to_win_means_no_trial() -> None:
    controller = Controller("auto", ["router"])
    run(controller, helps("router", 0.5), 5_000, 1, stall_frac=0.005)
    assert (controller.trials, controller.active) == (0, None)
    assert "nothing to win" in controller.reason


def test_another_workload_is_tried_soon() -> None:
    controller = Controller("auto", ["router"])
    run(controller, lambda i, active: 1.0, 40_000, 1, stall_frac=0.1)
    before = controller.trials
    run(controller, lambda i, active: 1.0, FIRST_REST + 2 * WINDOW * (MAX_PAIRS + 4), 2, stall_frac=0.5)
    assert controller.trials > before


def test_a_trial_says_of_what_it_is_and_what_was_decided_before() -> None:
    controller = Controller("auto", ["router", "token"])
    assert controller.reason == "nothing tried yet"

    def feed_until(is_trial: bool) -> list[str]:
        """The reasons until a trial begins, or ends."""
        reasons = list[str]()
        while (not reasons or reasons[-1].startswith("trial")) != is_trial or len(reasons) < 2:
            controller.on_token(TOKEN_S * (0.8 if controller.active == "router" else 1.0), TOKEN_S / 3)
            reasons.append(controller.reason)
        return reasons

    assert feed_until(True)[-1].startswith("trial of router against off, 0 of 4 to 12 pairs done; before: nothing")
    during = dict.fromkeys(feed_until(False))
    chosen = during.popitem()[0]
    assert chosen.startswith("router: router chosen (-20.0% ")
    assert [reason.split(", ")[1].split()[0] for reason in during] == ["0", "1", "2", "3"]
    assert feed_until(True)[-1] == f"trial of off against router, 0 of 4 to 12 pairs done; before: {chosen}"


@pytest.mark.parametrize(("mode", "active"), [("off", None), ("token", "token")])
def test_a_setting_is_obeyed(mode: str, active: str | None) -> None:
    controller = Controller(mode, ["router", "token"])
    run(controller, helps("router", 0.5), 3_000, 1)
    assert (controller.active, controller.trials) == (active, 0)
    assert controller.reason == f"set to {mode}"
