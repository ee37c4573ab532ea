"""The prefetch daemon against what goes wrong around it: kill -9, damaged files, too little shared memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparkle import manifest, regions
from sparkle import store as stores
from sparkle._native import LOADING, READY, Pool
from sparkle.errors import StorageError
from sparkle.manifest import ExpertLayer, FileSum, expert_header, layout_class
from sparkle.messages import Status, StatusRequest
from sparkle.store import Store
from tests.daemons import WAIT_S, DaemonProcess, spawn
from tests.ipc.pool_user import PoolUser, record

pytestmark = pytest.mark.ipc

N_EXPERTS = 8
STATUS_S = 0.1  # CONTRIBUTING.md, section 6


@pytest.fixture
def store(random_stores: dict[str, Path], tmp_path: Path) -> Store:
    """A store that a test may damage."""
    return Store.open(shutil.copytree(random_stores["aligned"], tmp_path / "copy.store"))


@pytest.fixture
def settings(store: Store) -> dict[str, str]:
    """Half of the experts fit; nothing comes unasked, and what was used last leaves last."""
    half = {"SPARKLE_MODEL": str(store.path), "SPARKLE_POOL": "50%"}
    return {**half, "SPARKLE_BACKGROUND_FILL": "off", "SPARKLE_POLICY": "lru"}


@pytest.fixture(scope="module")
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A sparse file of 128 records of 4 MiB: a pool that takes a while to allocate."""
    root = tmp_path_factory.mktemp("large") / "large.store"
    (root / "experts").mkdir(parents=True)
    layout = layout_class("large", [("up_proj.weight", "U8", (4 << 20,))], {})
    header = expert_header(layout, 128)
    with (root / stores.expert_file(0)).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 128 * layout.stride_bytes)
    sums = (stores.checksum(bytes(layout.record_bytes)),) * 128
    layer = ExpertLayer(0, "m", "main", 0, 128, 2, stores.expert_file(0), len(header), sums)
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 64}
    for name, data in {stores.CONFIG: json.dumps(config).encode(), stores.RESIDENT: b"\2" + bytes(7) + b"{}"}.items():
        (root / name).write_bytes(data)
    files = {p.name: FileSum(p.stat().st_size, stores.checksum(p.read_bytes())) for p in root.iterdir() if p.is_file()}
    (root / manifest.MANIFEST).write_text(json.dumps(manifest.to_json([layout], [layer], {}, files, {})))
    return Store.open(root)


def shm_of(daemon: DaemonProcess) -> list[str]:
    prefix = daemon.run_dir.shm_prefix.lstrip("/")
    return sorted(p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(prefix))


def pool_of(daemon: DaemonProcess) -> Pool:
    return Pool.attach(regions.control_name(daemon.run_dir.shm_prefix))


@contextmanager
def restarted(daemon: DaemonProcess, settings: dict[str, str]) -> Iterator[DaemonProcess]:
    """kill -9, and a successor."""
    daemon.kill()
    with spawn("prefetch", daemon.run_dir.path, settings) as successor:
        yield successor


# --- kill -9 --------------------------------------------------------------------------------------------------------


def test_a_successor_adopts_the_pool_with_its_experts(settings: dict[str, str], store: Store, short_dir: Path) -> None:
    with spawn("prefetch", short_dir, settings) as first, PoolUser(short_dir, store) as user:
        user.use(0, range(6))
        held = user.hold(1, [0, 1])
        before = shm_of(first)
        with restarted(first, settings) as second:
            status = second.wait_for_state("ready", slots_used=8, slots_held=2, n_clients=1)
            assert "adopted with 8 experts" in status.detail
            assert shm_of(second) == before
            assert user.use(0, range(2, 6)) == [2, 3, 4, 5]  # hits: no message, no read
            user.release()
            user.use(1, [2, 3])  # a miss: the restarted daemon knows this client
            metrics = second.wait_for_state("ready", slots_held=0).metrics
            assert metrics["bytes_read"] == 2 * store.classes[0].record_bytes
            assert [user.bytes_in(s) for s in held] == [record(store, 1, 0), record(store, 1, 1)]  # LRU took others
            assert user.client.generation == 1
            second.terminate()
            assert shm_of(second) == []


def test_a_slot_that_was_being_read_is_read_again(settings: dict[str, str], store: Store, short_dir: Path) -> None:
    """As the dead daemon leaves it: LOADING, half of the old bytes, the table without its owner."""
    with spawn("prefetch", short_dir, settings) as first, PoolUser(short_dir, store) as user:
        user.use(0, range(8))
        first.process.send_signal(signal.SIGSTOP)
        pool = pool_of(first)
        slot, other = pool.lookup(0, 3), pool.lookup(0, 4)
        assert pool.begin_load(slot, 1, 7)
        pool.set_client(9, "compute-1-dead")  # a client that died with it
        assert pool.grant(other, 1 << 9)
        for piece in user.client.regions[0].pieces:
            piece[slot, ::2] = 0
        with restarted(first, settings) as second:
            second.wait_for_state("ready", slots_used=8, slots_loading=0, slots_held=0, n_clients=1)
            assert (pool.state(slot), pool.owner(slot), pool.lookup(0, 3)) == (READY, (1, 7), -1)
            assert user.use(1, [7]) == [slot]
            user.use(0, [0, 1, 2, 4, 5, 6, 7])


def test_an_acquire_outlives_the_daemon_that_it_asked(settings: dict[str, str], store: Store, short_dir: Path) -> None:
    """Killed after it has the request, before it answers; the successor serves the same call."""
    with spawn("prefetch", short_dir, settings) as first, PoolUser(short_dir, store) as user:
        user.use(0, range(4))
        first.process.send_signal(signal.SIGSTOP)
        worker = threading.Thread(target=user.use, args=(1, [0, 1, 2, 3, 4]))
        worker.start()
        while user.client.native.ring_position < 12:  # the event of the second set is written before it is asked for
            assert worker.is_alive()
        pool = pool_of(first)
        assert pool.begin_load(7, 1, 2)
        assert pool.state(7) == LOADING
        with restarted(first, settings) as second:
            worker.join(WAIT_S)
            assert not worker.is_alive()
            metrics = second.wait_for_state("ready", slots_held=0, slots_loading=0).metrics
            assert metrics["unplaced_experts"] == 0
            assert user.client.unplaced_experts == 0


def test_any_number_of_kills_never_gives_wrong_bytes(settings: dict[str, str], store: Store, short_dir: Path) -> None:
    n_used, is_over, failures = [0], threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            with PoolUser(short_dir, store) as user:
                step = 0
                while not is_over.is_set():
                    step += 1
                    user.use(step % 2, [(step * k) % N_EXPERTS for k in (1, 3, 5)] if step % 2 else [step % N_EXPERTS])
                    n_used[0] += 1
        except BaseException as e:
            failures.append(e)
            raise

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for round_ in range(4):
            until = n_used[0] + 30 * (round_ + 1)
            with spawn("prefetch", short_dir, settings) as daemon:
                while n_used[0] < until and not failures:
                    daemon.status()
                if round_ < 3:
                    daemon.kill()
                else:
                    is_over.set()
                    worker.join(WAIT_S)
                    daemon.wait_for_state("ready", slots_held=0, unplaced_experts=0)
    finally:
        is_over.set()
        worker.join(WAIT_S)
    assert not failures


def test_a_client_gets_a_new_pool_after_an_orderly_restart(
    settings: dict[str, str], store: Store, short_dir: Path
) -> None:
    with spawn("prefetch", short_dir, settings) as first, PoolUser(short_dir, store) as user:
        user.use(0, [0, 1])
        first.terminate()
        assert shm_of(first) == []
        user.use(0, [1])  # what it has mapped is still there, and nobody changes it
        with spawn("prefetch", short_dir, settings) as second:
            user.use(0, [2])
            assert user.client.generation == 2
            user.use(0, [0, 1, 2])
            second.wait_for_state("ready", slots_used=3, slots_held=0)


def test_a_pool_of_another_size_is_replaced(settings: dict[str, str], store: Store, short_dir: Path) -> None:
    with spawn("prefetch", short_dir, settings) as first:
        first.wait_for_state("ready", n_slots=8)
        before = shm_of(first)
        with restarted(first, {**settings, "SPARKLE_POOL": "100%"}) as second:
            second.wait_for_state("ready", n_slots=16)
            assert len(shm_of(second)) == len(before)
            assert len({*shm_of(second), *before}) == 3  # the control segment keeps its name
            second.terminate()
            assert shm_of(second) == []


def test_damaged_control_segments_do_not_prevent_a_start(
    settings: dict[str, str], store: Store, short_dir: Path
) -> None:
    with spawn("prefetch", short_dir, settings) as first:
        first.wait_for_state("ready")
        segment = Path("/dev/shm") / regions.control_name(first.run_dir.shm_prefix).lstrip("/")
        first.kill()
        whole = segment.read_bytes()
        at = whole.index(b'[{"name"')
        left = [p for p in shm_of(first) if p != segment.name]
        for damaged in (whole[:-1], whole[:at] + b"{" + whole[at + 1 :]):
            segment.write_bytes(damaged)
            with spawn("prefetch", short_dir, settings) as daemon:
                daemon.wait_for_state("ready", slots_used=0)
                daemon.terminate()
                assert shm_of(daemon) == left  # whose names the damage took with it
        for name in left:
            (segment.parent / name).unlink()


def test_lock_files_of_dead_clients_are_removed_at_start(settings: dict[str, str], short_dir: Path) -> None:
    (short_dir / "clients").mkdir()
    (short_dir / "clients" / "compute-1-ab.lock").touch()
    with spawn("prefetch", short_dir, settings) as daemon:
        daemon.wait_for_state("ready")
        assert list(daemon.run_dir.clients.iterdir()) == []


# --- files that are not what they were ------------------------------------------------------------------------------


def test_a_damaged_record_fails_its_request_and_no_other(
    settings: dict[str, str], store: Store, short_dir: Path
) -> None:
    with spawn("prefetch", short_dir, settings) as daemon, PoolUser(short_dir, store) as user:
        user.use(0, [0])
        with (store.path / store.layers[1].file).open("r+b") as file:
            file.seek(store.record_offset(1, 5) + 1000)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        for _ in range(2):  # the second time it is known to be damaged
            with pytest.raises(StorageError, match=r"expert 5 of layer 1 in .*checksum is wrong; prepare the store"):
                user.use(1, [4, 5, 6])
        user.use(1, [4, 6])
        user.use(0, range(4))
        metrics = daemon.wait_for_state("ready", slots_held=0, slots_loading=0).metrics
        assert (metrics["records_quarantined"], metrics["fetches_failed"], metrics["reads_retried"]) == (1, 2, 1)
        assert metrics["unplaced_experts"] >= 2
        assert user.client.unplaced_experts == 2


def test_a_file_that_gets_shorter_fails_the_requests_beyond_its_end(
    settings: dict[str, str], store: Store, short_dir: Path
) -> None:
    with spawn("prefetch", short_dir, settings) as daemon, PoolUser(short_dir, store) as user:
        user.use(0, [0])
        os.truncate(store.path / store.layers[1].file, store.record_offset(1, 6))
        with pytest.raises(StorageError, match=r"cannot read expert 7 of layer 1 in .*models verify"):
            user.use(1, [0, 7])
        user.use(1, [0, 5])
        user.use(0, [7])
        daemon.wait_for_state("ready", slots_held=0, records_quarantined=1, fetches_failed=1)


@pytest.mark.parametrize("fault", ["missing", "truncated", "absent file"])
def test_a_store_that_is_not_sound_is_refused_at_start(
    settings: dict[str, str], store: Store, short_dir: Path, fault: str
) -> None:
    expert_file = store.path / store.layers[1].file
    if fault == "missing":
        shutil.rmtree(store.path)
    elif fault == "truncated":
        os.truncate(expert_file, expert_file.stat().st_size - 4096)
    else:
        expert_file.unlink()
    with spawn("prefetch", short_dir, settings) as daemon:
        assert daemon.wait_for_exit() == 74
        text = daemon.stderr()
        assert "sparkle-ctl models prepare" in text
        assert str(store.path if fault == "missing" else expert_file) in text
        assert ("4096 bytes are missing" in text) == (fault == "truncated")
        assert shm_of(daemon) == []
    assert [p.name for p in short_dir.iterdir()] == ["clients"]


# --- too little room ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["1m", "4600k"], ids=["no room for the control segment", "no room for a region"])
def test_full_shared_memory_is_refused_at_start(settings: dict[str, str], short_dir: Path, size: str) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("not allowed to make a mount namespace")
    script = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && {sys.executable} -m sparkled.prefetch; code=$?; "
    script += "echo left: $(ls -A /dev/shm) >&2; exit $code"
    environ = {**os.environ, **settings, "SPARKLE_POOL": "100%", "SPARKLE_RUN_DIR": str(short_dir)}
    ran = subprocess.run(["unshare", "-m", "sh", "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 78, ran.stderr
    assert "shared memory" in ran.stderr
    assert "make /dev/shm larger" in ran.stderr
    assert ran.stderr.rstrip().endswith("left:")
    assert [p.name for p in short_dir.iterdir()] == ["clients"]


def test_a_run_directory_too_long_for_a_socket_is_refused(settings: dict[str, str], tmp_path: Path) -> None:
    environ = {**os.environ, **settings, "SPARKLE_RUN_DIR": str(tmp_path / ("x" * 100))}
    command = [sys.executable, "-m", "sparkled.prefetch"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 78
    assert "set SPARKLE_RUN_DIR (or --run-dir) to a shorter path" in ran.stderr


# --- a pool that takes a while --------------------------------------------------------------------------------------


def test_status_is_answered_while_a_large_pool_is_allocated(large_store: Store, short_dir: Path) -> None:
    with spawn("prefetch", short_dir, {"SPARKLE_MODEL": str(large_store.path)}) as daemon:
        while not daemon.run_dir.socket("prefetch").exists():
            assert daemon.process.poll() is None, daemon.stderr()
        peer, state, times = daemon.peer(), "starting", list[float]()  # connects at once, now that there is a socket
        while state == "starting":
            began = time.monotonic()
            peer.send(StatusRequest())
            state = peer.wait_for(Status).state
            times.append(time.monotonic() - began)
        assert len(times) > 3
        assert max(times) < 2 * STATUS_S  # a busy test machine may take its time too
        assert statistics.median(times) < STATUS_S
        with PoolUser(short_dir, large_store) as user:
            user.use(0, [0, 127])
        daemon.terminate()
        assert shm_of(daemon) == []


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_that_ends_while_allocating_leaves_nothing(
    large_store: Store, settings: dict[str, str], short_dir: Path, signum: int
) -> None:
    with spawn("prefetch", short_dir, {"SPARKLE_MODEL": str(large_store.path)}) as daemon:
        while len(shm_of(daemon)) < 2:
            assert daemon.process.poll() is None, daemon.stderr()
        daemon.process.send_signal(signum)
        assert daemon.wait_for_exit() == (0 if signum == signal.SIGTERM else -signal.SIGKILL)
        if signum == signal.SIGKILL:
            with spawn("prefetch", short_dir, settings) as successor:
                successor.wait_for_state("ready", slots_used=0)
        assert shm_of(daemon) == []
