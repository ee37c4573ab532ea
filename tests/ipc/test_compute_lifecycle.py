"""The compute daemon and what goes wrong around it: prefetch daemons that are killed, disks, settings, its own end."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from statistics import median

import pytest

from sparkle.config import PROGRESS_S
from sparkle.errors import ConfigError, StorageError
from sparkle.manifest import MANIFEST, fingerprint_of
from sparkle.messages import Error, Finished, Generate, Progress
from sparkle.store import Store
from tests.daemons import STOP_S, DaemonProcess, Peer, spawn
from tests.ipc.computes import (
    GREEDY,
    SMALLEST,
    ask,
    catch_up,
    finish,
    pair,
    refusal,
    request,
    sampled,
    tokens_of,
    wait_for_tokens,
)

pytestmark = pytest.mark.ipc

STATUS_S = 0.1  # a StatusRequest is answered within this, in every state


def copy_of(store: Path, folder: Path) -> Path:
    return shutil.copytree(store, folder / "copy.store")


def damage(store: Path, layer: int, experts: range) -> None:
    """Turn round one bit in each of these records."""
    opened = Store.open(store)
    with (store / opened.layers[layer].file).open("r+b") as file:
        for expert in experts:
            at = opened.record_offset(layer, expert) + 100
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())  # direct reads do not see what waits in the page cache


# --- the prefetch daemon comes and goes ------------------------------------------------------------------------------


def test_it_waits_for_the_prefetch_daemon(tiny_store: Path, short_dir: Path) -> None:
    """In STARTING it answers, refuses requests with a reason, and is READY once there is a pool."""
    settings = {"SPARKLE_MODEL": str(tiny_store), "SPARKLE_READ_DEPTH": "4"}
    with spawn("compute", short_dir, settings) as compute:
        assert compute.wait_for_state("starting").detail == "waiting for the prefetch daemon, then loading the model"
        peer = compute.peer()
        error = refusal(peer, request())
        assert (error.code, error.retryable) == ("peer", True)
        assert "starting: waiting for the prefetch daemon" in error.message
        assert median(status_seconds(compute) for _ in range(9)) < STATUS_S
        with spawn("prefetch", short_dir, settings):
            compute.wait_for_state("ready")
            assert len(tokens_of(peer, request())) == 12
            compute.terminate()


def status_seconds(daemon: DaemonProcess) -> float:
    began = time.monotonic()
    daemon.status()
    return time.monotonic() - began


def test_prefetch_is_killed_and_comes_back(tiny_store: Path) -> None:
    """In the middle of two answers, with a pool that holds no token's experts: they go on with the same tokens."""
    messages = [request(max_tokens=40), request(max_tokens=40, sampling=sampled(3))]
    with pair(tiny_store, SMALLEST) as daemons:
        peer = daemons.compute.peer()
        expected = [tokens_of(peer, message) for message in messages]
        peer.received.clear()
        for n_before in (5, 20):
            for message in messages:
                peer.send(message)
            wait_for_tokens(peer, messages[0].request_id, n_before)
            daemons.prefetch.kill()
            assert peer.wait_for(Progress), "it is said that the answers are still under way"
            daemons.restart_prefetch()
            assert [finish(peer, message.request_id).tokens for message in messages] == expected
            peer.received.clear()
        daemons.prefetch.terminate()  # its pool goes with it: the next has other regions, and does not know the client
        daemons.restart_prefetch()
        daemons.prefetch.wait_for_state("ready")
        assert [tokens_of(peer, message) for message in messages] == expected
        assert daemons.compute.status().metrics["unplaced_experts"] == 0


def test_prefetch_does_not_come_back(tiny_store: Path) -> None:
    """At the deadline the request fails, once and by name; the daemon lives, and serves when there is a pool again."""
    message = request(max_tokens=60)
    with pair(tiny_store, SMALLEST, {"FETCH_DEADLINE_S": 1.0}) as daemons:
        peer = daemons.compute.peer()
        expected = tokens_of(peer, message)
        peer.received.clear()
        peer.send(message)
        wait_for_tokens(peer, message.request_id, 5)
        daemons.prefetch.kill()
        answer = finish(peer, message.request_id)
        assert isinstance(answer.end, Error)
        assert (answer.end.code, answer.end.retryable) == ("unplaced_expert", True)
        assert "were not placed within 1 s" in answer.end.message
        assert expected[: len(answer.tokens)] == answer.tokens
        metrics = daemons.compute.wait_for_state("ready", n_active=0).metrics
        assert (metrics["unplaced_experts"], metrics["requests_failed"]) == (1, 1)
        daemons.restart_prefetch()
        daemons.prefetch.wait_for_state("ready")
        catch_up(peer)
        peer.received.clear()
        assert tokens_of(peer, message) == expected


# --- the disk --------------------------------------------------------------------------------------------------------


def test_a_record_that_is_damaged_fails_the_requests_that_need_it(tiny_store: Path, tmp_path: Path) -> None:
    """And no others. The first layer's routing depends on the token alone, so prompts of one token choose experts."""
    store = copy_of(tiny_store, tmp_path)
    messages = [request([token], max_tokens=1) for token in range(30, 60)]
    with pair(store, {**SMALLEST, "SPARKLE_CHECKSUM_FRAC": "1"}) as daemons:
        peer = daemons.compute.peer()
        expected = [tokens_of(peer, message) for message in messages]
        peer.received.clear()
        damage(store, 0, range(3, 5))
        answers = [ask(peer, message) for message in messages]
        failed = [a.end for a in answers if isinstance(a.end, Error)]
        assert 0 < len(failed) < len(messages)
        assert {e.code for e in failed} == {"storage"}
        for error in failed:
            assert "layer 0" in error.message and "layer_000.safetensors" in error.message, error
            assert "expert 3" in error.message or "expert 4" in error.message
        good = [(a.tokens, e) for a, e in zip(answers, expected, strict=True) if isinstance(a.end, Finished)]
        assert all(got == wanted for got, wanted in good)
        assert daemons.compute.status().metrics["requests_failed"] == len(failed)


def test_it_starts_though_no_record_of_a_layer_is_sound(tiny_store: Path, tmp_path: Path) -> None:
    store = copy_of(tiny_store, tmp_path)
    damage(store, 1, range(16))
    with pair(store, SMALLEST) as daemons:
        answer = ask(daemons.compute.peer(), request())
        assert isinstance(answer.end, Error)
        assert answer.end.code == "storage" and "layer_001.safetensors" in answer.end.message
        assert answer.tokens == []


def test_resident_weights_that_cannot_be_read(tiny_store: Path, short_dir: Path, tmp_path: Path) -> None:
    store = copy_of(tiny_store, tmp_path)
    with (store / "resident.safetensors").open("r+b") as file:
        file.write(b"\xff" * 100)
    settings = {"SPARKLE_MODEL": str(store)}
    with spawn("prefetch", short_dir, settings), spawn("compute", short_dir, settings) as compute:
        assert compute.wait_for_exit() == StorageError.exit_code
        assert "resident.safetensors" in compute.stderr() and "Traceback" not in compute.stderr()


# --- settings --------------------------------------------------------------------------------------------------------


def test_the_two_daemons_serve_different_models(tiny_store: Path, short_dir: Path, tmp_path: Path) -> None:
    other = copy_of(tiny_store, tmp_path)
    manifest = json.loads((other / MANIFEST).read_text())
    manifest["layers"][0]["xxh3"][:2] = reversed(manifest["layers"][0]["xxh3"][:2])
    manifest["fingerprint"] = fingerprint_of(manifest)
    (other / MANIFEST).write_text(json.dumps(manifest))
    with (
        spawn("prefetch", short_dir, {"SPARKLE_MODEL": str(tiny_store)}) as prefetch,
        spawn("compute", short_dir, {"SPARKLE_MODEL": str(other)}) as compute,
    ):
        assert compute.wait_for_exit() == ConfigError.exit_code
        said = compute.stderr()
        assert f"expects model {manifest['fingerprint'][:12]}" in said and "give both the same SPARKLE_MODEL" in said
        assert "Traceback" not in said
        assert prefetch.wait_for_state("ready", slots_held=0)


def test_no_gpu(tiny_store: Path, short_dir: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    if mx.is_available(mx.gpu):
        pytest.skip("this machine has one")
    settings = {"SPARKLE_MODEL": str(tiny_store), "SPARKLE_DEVICE": "gpu"}
    with spawn("compute", short_dir, settings) as compute:
        assert compute.wait_for_exit() == ConfigError.exit_code
        assert "device = gpu, but this mlx has no GPU backend; use auto" in compute.stderr()
        assert "Traceback" not in compute.stderr()
        assert not list(short_dir.glob("compute.*"))


# --- its end ---------------------------------------------------------------------------------------------------------


def drained(peer: Peer) -> None:
    """Receive what a daemon that has ended still said."""
    while peer._socket.poll(200):
        peer.receive()


def end_of(peer: Peer, message: Generate) -> str:
    answer = finish(peer, message.request_id)
    assert isinstance(answer.end, Finished), answer.end
    return answer.end.reason


def test_sigterm_ends_every_request(tiny_store: Path) -> None:
    """Those that generate, that read their prompt, and that wait."""
    with pair(tiny_store, {"SPARKLE_MAX_ACTIVE": "2", "SPARKLE_POOL": "50%"}) as daemons:
        peer = daemons.compute.peer()
        messages = [
            request(max_tokens=None),
            request([20] * 1000, max_tokens=None),
            request(),
            request(sampling=GREEDY),
        ]
        for message in messages:
            peer.send(message)
        wait_for_tokens(peer, messages[0].request_id, 3)
        daemons.compute.terminate()
        drained(peer)
        assert [end_of(peer, message) for message in messages] == ["cancelled"] * 4


def test_sigterm_while_it_waits_for_experts(tiny_store: Path) -> None:
    with pair(tiny_store, SMALLEST) as daemons:
        peer = daemons.compute.peer()
        message = request(max_tokens=None)
        peer.send(message)
        wait_for_tokens(peer, message.request_id, 3)
        daemons.prefetch.kill()
        assert isinstance(peer.wait_for(Progress, 2 * PROGRESS_S + 1.0), Progress)
        began = time.monotonic()
        daemons.compute.terminate()
        assert time.monotonic() - began < STOP_S
        drained(peer)
        assert end_of(peer, message) == "cancelled"
        daemons.restart_prefetch()  # it takes over what the killed one left, and cleans up at its end
        daemons.prefetch.wait_for_state("ready")


@pytest.mark.parametrize("has_pool", [False, True])
def test_sigterm_while_it_starts(tiny_store: Path, short_dir: Path, has_pool: bool) -> None:
    settings = {"SPARKLE_MODEL": str(tiny_store), "SPARKLE_READ_DEPTH": "4"}
    with spawn("compute", short_dir, settings) as compute:
        compute.wait_for_state("starting")
        if not has_pool:
            compute.terminate()
            return
        with spawn("prefetch", short_dir, settings) as prefetch:
            while "client_attached" not in prefetch.stderr():  # from here on it loads the model
                assert compute.process.poll() is None, compute.stderr()
            compute.terminate()
            assert "Traceback" not in compute.stderr()
            prefetch.wait_for_state("ready", n_clients=0, slots_held=0)
