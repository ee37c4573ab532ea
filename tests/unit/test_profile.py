"""Recorded usage: what an event counts, how it fades, and a file that nothing can tear and that no bytes can fool."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkle.errors import ConfigError, SparkleError, StorageError
from sparkle.policy import LayerShape, make_policy
from sparkle.profile import MANY_ROWS, STALE_S, UsageProfile, load, profile_path, set_aside
from sparkle.trace import Event

pytestmark = pytest.mark.unit

FINGERPRINT = "0123456789abcdef" * 4
LAYERS = (LayerShape(0, 8, 2), LayerShape(1, 8, 2), LayerShape(5, 4, 1))  # indices have gaps, widths differ
# hypothesis warns of a folder that examples share; each writes its file anew
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)


def new(half_life: float = 1000.0, fingerprint: str = FINGERPRINT, layers: Any = LAYERS) -> UsageProfile:
    return UsageProfile(fingerprint, "tiny", layers, half_life)


def event(layer: int, experts: list[int], rows: int = 1, step: int = 0, stream: int = 0) -> Event:
    return Event(step, 0, stream, rows, 0, layer, experts, [True] * len(experts))


def token(profile: UsageProfile, *experts: list[int], times: int = 1) -> None:
    """Let whole steps of one row pass: `experts` of the first layers."""
    for _ in range(times):
        for layer, used in zip(profile.layers, experts, strict=False):
            profile.observe(event(layer.index, used))


# --- what counts ----------------------------------------------------------------------------------------------------


def test_a_share_is_that_of_all_tokens() -> None:
    profile = new(half_life=1e9)
    token(profile, [0, 1], [2, 3], [0], times=3)
    token(profile, [0, 2], [2, 3], [1])
    assert profile.n_tokens == 4
    assert profile.usage() == pytest.approx(
        {(0, 0): 1, (0, 1): 0.75, (0, 2): 0.25, (1, 2): 1, (1, 3): 1, (5, 0): 0.75, (5, 1): 0.25}
    )
    assert profile.share((0, 1)) == pytest.approx(0.75)
    assert profile.share((0, 7)) == 0


def test_hottest_first_and_equals_in_order() -> None:
    profile = new(half_life=1e9)
    token(profile, [6, 1], [4, 0], times=2)
    token(profile, [6, 3], [4, 7])
    assert profile.hottest() == [(0, 6), (1, 4), (0, 1), (1, 0), (0, 3), (1, 7)]
    assert profile.hottest(2) == [(0, 6), (1, 4)]


def test_a_layer_that_is_not_part_of_every_token_has_a_share_of_all() -> None:
    profile = new(half_life=1e9)
    for i in range(100):
        token(profile, [0, 1], [0, 1])
        if i % 4 == 3:
            profile.observe(event(5, [3]))
    assert profile.share((5, 3)) == pytest.approx(0.25)
    assert profile.n_tokens == 100
    assert profile.recent_tokens == pytest.approx(100)


def test_streams_that_take_turns_are_all_counted_once() -> None:
    profile = new(half_life=1e9)
    for step in range(10):
        for layer in (0, 1):  # two conversations, layer by layer
            for stream in (1, 2):
                profile.observe(event(layer, [stream, 0], step=step, stream=stream))
    assert profile.n_tokens == 20
    assert profile.share((1, 0)) == pytest.approx(1)
    assert profile.share((1, 1)) == pytest.approx(0.5)


def test_a_use_counts_half_after_a_half_life() -> None:
    profile = new(half_life=100)
    token(profile, [0, 1], [0, 1], times=2000)
    token(profile, [2, 3], [0, 1], times=100)
    assert profile.share((0, 0)) == pytest.approx(0.5, abs=0.005)
    assert profile.share((0, 2)) == pytest.approx(0.5, abs=0.005)
    assert profile.share((1, 0)) == pytest.approx(1)
    assert profile.recent_tokens == pytest.approx(profile.limit, rel=0.01)


def test_decay_goes_on_forever() -> None:
    """The unit in which later uses count more is set back before it leaves what a float can hold."""
    profile = new(half_life=1)
    token(profile, [0, 1], times=3000)
    token(profile, [0, 2])
    assert profile.share((0, 0)) == pytest.approx(1)
    assert profile.share((0, 1)) == pytest.approx(0.5, abs=0.01)
    assert profile.n_tokens == 3001


def test_a_long_prompt_counts_little_and_blurs_nothing() -> None:
    profile = new(half_life=1e9)
    token(profile, [0, 1], times=100)
    profile.observe(event(0, list(range(8)), rows=4096))
    assert profile.n_tokens == 100 + 4096
    assert profile.recent_tokens == pytest.approx(100 + MANY_ROWS)
    assert profile.share((0, 7)) == pytest.approx(MANY_ROWS * 2 / 8 / (100 + MANY_ROWS))
    assert profile.hottest(2) == [(0, 0), (0, 1)]


@given(
    st.lists(st.tuples(st.sampled_from([0, 1]), st.sets(st.integers(0, 7), min_size=2), st.integers(1, 40)), min_size=1)
)
def test_shares_stay_shares(steps: list[tuple[int, set[int], int]]) -> None:
    profile = new(half_life=3)
    for layer, experts, rows in steps:
        profile.observe(event(layer, sorted(experts), rows))
    usage = profile.usage()
    assert all(0 < share <= 1 for share in usage.values())
    assert profile.coverage(1.0) == pytest.approx(1)
    assert set(profile.hottest()) == set(usage)
    assert list(usage.values()) and usage[profile.hottest(1)[0]] == max(usage.values())


def test_verify_passes_of_drafts_count_in_full() -> None:
    profile = new(half_life=1e9)
    profile.observe(event(0, [0, 1], rows=4))  # four rows, all of which chose the same two
    assert profile.n_tokens == 4
    assert (profile.recent_tokens, profile.share((0, 0))) == pytest.approx((4, 1))


def test_how_concentrated_usage_is() -> None:
    profile = new(half_life=1e9, layers=[LayerShape(0, 10, 1)])
    assert profile.coverage(0.5) == 0
    for expert, n in enumerate((60, 20, 10, 10)):
        token(profile, [expert], times=n)
    assert [profile.coverage(frac) for frac in (0.1, 0.2, 0.5)] == pytest.approx([0.6, 0.8, 1.0])


def test_a_policy_takes_it() -> None:
    profile = new()
    token(profile, [0, 1], [2, 3], times=10)
    policy = make_policy("lfu", LAYERS)
    policy.seed(profile.usage())
    for key in ((0, 0), (0, 5), (1, 2)):
        policy.on_load(key, True)
    assert next(policy.victims()) == (0, 5)


# --- merge ----------------------------------------------------------------------------------------------------------


def test_profiles_merge_by_the_tokens_that_they_have_seen() -> None:
    one, other = new(half_life=1e9), new(half_life=1e9)
    token(one, [0, 1], times=30)
    token(other, [0, 2], times=10)
    one.merge(other)
    assert one.n_tokens == 40
    assert (one.share((0, 0)), one.share((0, 1)), one.share((0, 2))) == pytest.approx((1, 0.75, 0.25))
    one.merge(other, weight=2.0)
    assert one.share((0, 2)) == pytest.approx(0.5)


def test_a_long_past_does_not_outvote_the_present() -> None:
    old, young = new(half_life=10), new(half_life=10)
    token(old, [0, 1], times=5000)
    token(young, [2, 3], times=1000)
    young.merge(old)
    assert young.share((0, 0)) == pytest.approx(0.5, abs=0.01)


def test_a_profile_that_forgets_more_slowly_has_no_more_of_a_vote() -> None:
    slow, profile = new(half_life=1e6), new(half_life=10)
    token(slow, [0, 1], times=5000)
    token(profile, [2, 3], times=1000)
    profile.merge(slow)
    assert profile.share((0, 0)) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    "other", [new(fingerprint="f" * 64), new(layers=LAYERS[:2]), new(layers=(*LAYERS[:2], LayerShape(5, 4, 2)))]
)
def test_another_model_is_refused(other: UsageProfile) -> None:
    profile = new()
    token(profile, [0, 1])
    with pytest.raises(ConfigError, match=FINGERPRINT):
        profile.merge(other)
    assert profile.n_tokens == 1


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return profile_path(tmp_path / "state" / "sparkle", FINGERPRINT)


def used() -> UsageProfile:
    profile = new()
    token(profile, [0, 1], [2, 3], [0], times=5)
    token(profile, [0, 7], [2, 4], [1], times=2)
    return profile


def test_it_comes_back(path: Path) -> None:
    profile, again = used(), new()
    profile.save(path)
    assert path.name == "usage-0123456789abcdef.json"
    assert [path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777] == [0o700, 0o600]
    assert again.restore(path)
    assert again.usage() == pytest.approx(profile.usage(), abs=1e-6)
    assert again.hottest() == profile.hottest()
    assert again.n_tokens == profile.n_tokens == 7
    assert again.recent_tokens == pytest.approx(profile.recent_tokens, abs=1e-3)
    assert again.saved_at == pytest.approx(profile.saved_at, abs=1e-3) and again.saved_at > 0
    token(again, [0, 1], [2, 3], [0])
    token(profile, [0, 1], [2, 3], [0])
    assert again.usage() == pytest.approx(profile.usage(), abs=1e-5)
    assert again.n_tokens == 8


def test_without_a_file_there_is_nothing_to_restore(path: Path) -> None:
    assert new().restore(path) is False
    with pytest.raises(StorageError, match="no such file"):
        load(path)


def test_it_knows_whether_there_is_anything_to_save(path: Path) -> None:
    profile = new()
    assert profile.is_saved
    token(profile, [0, 1])
    assert not profile.is_saved
    profile.save(path)
    assert profile.is_saved
    again = new()
    again.restore(path)
    assert again.is_saved


def test_the_file_of_a_large_model_is_small(path: Path) -> None:
    profile = new(layers=[LayerShape(i, 512, 10) for i in range(48)])
    draw = random.Random(1)
    for _ in range(100):
        token(profile, *(draw.sample(range(512), 10) for _ in range(48)))
    profile.save(path)
    assert path.stat().st_size < 200_000


def test_a_name_that_no_terminal_should_see_is_cleaned(path: Path) -> None:
    profile = UsageProfile(FINGERPRINT, "a\x1b[31mb\udcff", LAYERS)
    profile.save(path)
    assert load(path).model == "a?[31mb?"


def spoilt(path: Path, **changes: Any) -> None:
    used().save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def layer(**changes: Any) -> list[dict[str, Any]]:
    return [{"index": 0, "top_k": 2, "used_ppm": [0] * 8, **changes}]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "other"}, "format"),
        ({"version": 0}, "version"),
        ({"version": True}, "version"),
        ({"fingerprint": "../../etc"}, "fingerprint"),
        ({"model": 7}, "model"),
        ({"n_tokens": -1}, "n_tokens"),
        ({"n_tokens": 1.5}, "n_tokens"),
        ({"n_tokens": 10**30}, "n_tokens"),
        ({"recent_tokens": float("nan")}, "recent_tokens"),
        ({"recent_tokens": float("inf")}, "recent_tokens"),
        ({"recent_tokens": -1}, "recent_tokens"),
        ({"recent_tokens": 1e6}, "recent_tokens"),  # more than a half-life of 1000 lets anyone have
        ({"half_life": 0}, "half_life"),
        ({"saved_at": "yesterday"}, "saved_at"),
        ({"layers": {}}, "layers"),
        ({"layers": [[]]}, "layers"),
        ({"layers": layer(index=-1)}, "index"),
        ({"layers": layer() + layer()}, "twice"),
        ({"layers": layer(top_k=9)}, "top_k"),
        ({"layers": layer(used_ppm=[])}, "used_ppm"),
        ({"layers": layer(used_ppm=[float("nan")] * 8)}, "used_ppm"),
        ({"layers": layer(used_ppm=[-1] * 8)}, "used_ppm"),
        ({"layers": layer(used_ppm=[10**9] * 8)}, "used_ppm"),
        ({"layers": layer(used_ppm=[True] * 8)}, "used_ppm"),
    ],
)
def test_what_cannot_be_is_refused(path: Path, changes: dict[str, Any], reason: str) -> None:
    spoilt(path, **changes)
    before = path.read_bytes()
    profile = new()
    with pytest.raises(StorageError, match=reason) as caught:
        profile.restore(path)
    assert str(path) in str(caught.value) and "Move it away" in str(caught.value)
    assert profile.usage() == {} and path.read_bytes() == before


def test_a_newer_file_is_left_to_a_newer_sparkle(path: Path) -> None:
    spoilt(path, version=2, layers="whatever it has then")
    with pytest.raises(StorageError, match="version 2; this Sparkle reads 1"):
        new().restore(path)


def test_the_file_of_another_model_is_refused(path: Path) -> None:
    new(fingerprint="f" * 64).save(path)
    with pytest.raises(ConfigError, match=rf"{path} is of another model: tiny, fingerprint f+; .*{FINGERPRINT}"):
        new().restore(path)
    assert load(path).fingerprint == "f" * 64


@same_folder
@given(data=st.binary(max_size=300))
def test_no_bytes_get_past_load(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "usage.json"
    path.write_bytes(data)
    with pytest.raises(SparkleError):
        load(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@same_folder
@given(name=st.sampled_from(["version", "half_life", "n_tokens", "recent_tokens", "saved_at", "layers"]), value=JSON)
def test_no_field_crashes_load(tmp_path: Path, name: str, value: Any) -> None:
    spoilt(tmp_path / "usage.json", **{name: value})
    _load_or_refuse(tmp_path / "usage.json")


@same_folder
@given(name=st.sampled_from(["index", "top_k", "used_ppm"]), value=JSON | st.lists(JSON, max_size=3))
def test_no_field_of_a_layer_crashes_load(tmp_path: Path, name: str, value: Any) -> None:
    spoilt(tmp_path / "usage.json", layers=layer(**{name: value}))
    _load_or_refuse(tmp_path / "usage.json")


@same_folder
@given(at=st.integers(0, 10**6), cut=st.integers(0, 20), byte=st.binary(max_size=3))
def test_no_damage_crashes_load(tmp_path: Path, at: int, cut: int, byte: bytes) -> None:
    path = tmp_path / "usage.json"
    used().save(path)
    data = path.read_bytes()
    at %= len(data)
    path.write_bytes(data[:at] + byte + data[at + cut :])
    _load_or_refuse(path)


def _load_or_refuse(path: Path) -> None:
    """What gets through must be usable."""
    try:
        profile = load(path)
    except SparkleError:
        return
    assert all(0 <= share <= 1 for share in profile.usage().values())
    profile.save(path)
    assert load(path).layers == profile.layers


@pytest.mark.parametrize("text", ["[" * 100_000, '{"n_tokens": ' + "9" * 5000 + "}", " " * (17 << 20)])
def test_large_nonsense_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "usage.json").write_text(text)
    with pytest.raises(StorageError, match="damaged"):
        load(tmp_path / "usage.json")


def test_a_folder_in_its_place_is_an_error_and_not_a_crash(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(StorageError, match="cannot be read"):
        new().restore(path)
    with pytest.raises(StorageError, match="cannot be written"):
        used().save(path)
    assert list(path.parent.iterdir()) == [path]


def test_a_bad_file_is_moved_and_none_is_lost(path: Path) -> None:
    path.parent.mkdir(parents=True)
    for text in ("one", "two", "three"):
        path.write_text(text)
        set_aside(path)
    assert set_aside(path) is None
    found = {p.name: p.read_text() for p in path.parent.iterdir()}
    name = f"{path.name}.damaged"
    assert found == {name: "one", f"{name}-2": "two", f"{name}-3": "three"}


# --- others who write, and those who die ----------------------------------------------------------------------------


def test_two_daemons_may_save_at_the_same_time(path: Path) -> None:
    used().save(path)

    def save_often() -> None:
        for _ in range(100):
            used().save(path)

    writers = [threading.Thread(target=save_often) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert load(path).n_tokens == 7
    for writer in writers:
        writer.join()
    assert list(path.parent.iterdir()) == [path]


# One process saves for ever; of the other, a child each dies before and after every call of a save to the system.
MAKE = """
import os, signal, sys
from pathlib import Path
from sparkle.policy import LayerShape
from sparkle.profile import UsageProfile, load
from sparkle.trace import Event
path = Path(sys.argv[1])
profile = UsageProfile("0123456789abcdef" * 4, "m", [LayerShape(i, 512, 10) for i in range(int(sys.argv[2]))])
profile.observe(Event(0, 0, 0, 1, 0, 0, list(range(10)), [True] * 10))
"""
SAVER = f"""{MAKE}while True:
    profile.save(path)
    print(flush=True)
"""
DIER = """
def die(frame, what, arg):
    global n_left
    modules = {getattr(arg, "__module__", ""), type(getattr(arg, "__self__", "")).__module__}
    n_left -= what in ("c_call", "c_return") and not modules.isdisjoint({"posix", "io", "_io"})
    if n_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
profile.save(path)
n_calls, status = 0, -1
while status:
    n_calls += 1
    if (pid := os.fork()) == 0:
        n_left = n_calls
        sys.setprofile(die)
        profile.save(path)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert load(path).n_tokens == 1
print(n_calls)
"""


def test_kill_9_amid_saves_leaves_a_whole_file(path: Path) -> None:
    draw = random.Random(0)
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", SAVER, str(path), "48"], stdout=subprocess.PIPE) as saver:
            assert saver.stdout is not None
            for _ in range(draw.randint(1, 20)):
                assert saver.stdout.readline()
            saver.kill()  # it is somewhere in the saves that follow
        assert len(load(path).layers) == 48


def test_kill_9_at_any_point_of_a_save_leaves_a_whole_file(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MAKE + DIER, str(path), "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
    assert any(p.name.endswith(".tmp") for p in path.parent.iterdir())  # some died with the new file half done


def test_what_a_killed_save_left_is_removed_and_nothing_else(path: Path) -> None:
    path.parent.mkdir(parents=True)
    left, under_way = path.with_name(f".{path.name}.00aa.tmp"), path.with_name(f".{path.name}.00ff.tmp")
    another = path.with_name("usage-another.json")
    for file in (left, under_way, another):
        file.touch()
    for file in (left, another):
        os.utime(file, (0, file.stat().st_mtime - 2 * STALE_S))
    used().save(path)
    assert sorted(path.parent.iterdir()) == sorted([under_way, another, path])
