"""One dial: the machine's limit, what is derived from it, and refusals that state the arithmetic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkle import budget, config
from sparkle.budget import Budget, derive, gb, kv_bytes_per_token
from sparkle.errors import ConfigError
from sparkle.machine import memory_limit
from sparkle.manifest import ExpertLayer, FileSum, LayoutClass, layout_class
from sparkle.store import Store

pytestmark = pytest.mark.unit

GB = 10**9
RAM = 64 * GB
CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
MB_CLASS = layout_class("mb", [("up_proj.weight", "U8", (1_000_000,))], {})


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "memory_limit", lambda: (RAM, "RAM"))


def store_of(
    layers: Sequence[tuple[int, int, int]],
    classes: Sequence[LayoutClass] = (MB_CLASS,),
    kinds: str = "m",
    **changes: Any,
) -> Store:
    """A store of (class, n_experts, top_k) per layer, without files; kinds: m(ain) or d(rafter), in turn."""
    made = [
        ExpertLayer(
            i, f"layers.{i}", "main" if kinds[i % len(kinds)] == "m" else "mtp", c, n, k, f"{i}", 16384, (0,) * n
        )
        for i, (c, n, k) in enumerate(layers)
    ]
    files = {"resident.safetensors": FileSum(100_000_000, 0), "config.json": FileSum(2, 0)}
    return Store(Path("m.store"), "f" * 64, tuple(classes), tuple(made), {**CONFIG, **changes}, {}, files, {})


def settings(**flags: str) -> config.Settings:
    return config.load(flags, environ={})


def pool_of(text: str, store: Store) -> Budget:
    return derive(settings(pool=text), store)


# --- the machine ------------------------------------------------------------------------------------------------------


def tree(root: Path, cgroup: str, limits: dict[str, str]) -> Path:
    """A fake machine: /proc/self/cgroup and limit files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in limits.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = "12:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n1:name=systemd:/docker/ab\n"


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected", "reason"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "3000\n"}, 3000, "a/b/memory.max"),
        ("0::/a/b\n", {"a/b/memory.max": "max\n"}, 9000, "RAM"),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "2000\n"}, 2000, "a/memory.max"),
        ("0::/a/b\n", {"a/b/memory.max": "5000\n", "a/memory.max": "2000\n"}, 2000, "a/memory.max"),
        ("0::/a/b\n", {"a/b/memory.max": "2000\n", "a/memory.max": "5000\n"}, 2000, "a/b/memory.max"),
        ("0::/\n", {"memory.max": "4000\n"}, 4000, "cgroup/memory.max"),  # a container sees itself as the root
        ("0::/a\n", {"a/memory.max": "99999\n"}, 9000, "RAM"),  # more than there is
        ("0::/a\n", {}, 9000, "RAM"),
        (V1, {"memory/docker/ab/memory.limit_in_bytes": "3000\n"}, 3000, "ab/memory.limit_in_bytes"),
        (V1, {"memory/docker/ab/memory.limit_in_bytes": "9223372036854771712\n"}, 9000, "RAM"),
        (V1, {"memory/docker/memory.limit_in_bytes": "2500\n"}, 2500, "docker/memory.limit_in_bytes"),
        (V1, {"memory/memory.limit_in_bytes": "1500\n"}, 1500, "memory/memory.limit_in_bytes"),
        (V1, {"docker/ab/memory.max": "3000\n"}, 9000, "RAM"),  # not where v1 has it
        (V1 + "0::/a\n", {"memory/docker/ab/memory.limit_in_bytes": "3000\n", "a/memory.max": "2"}, 2, "a/memory.max"),
        ("", {}, 9000, "RAM"),
    ],
)
def test_the_smallest_limit_on_the_way_up_binds(
    tmp_path: Path, cgroup: str, limits: dict[str, str], expected: int, reason: str
) -> None:
    n_bytes, why = memory_limit(tree(tmp_path, cgroup, limits), ram_bytes=9000)
    assert n_bytes == expected
    assert why.endswith(reason)


def test_a_machine_without_cgroups(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, ram_bytes=9000) == (9000, "RAM")


def test_this_machine_has_memory() -> None:
    n_bytes, why = memory_limit()
    assert n_bytes > 100 << 20
    assert why


# --- memory, context, pool --------------------------------------------------------------------------------------------


def test_everything_follows_from_the_dial() -> None:
    plan = derive(settings(memory="10GB"), store_of([(0, 512, 10)] * 48))
    resident = int(100_000_000 * 1.15)
    kv_bytes = 4096 * kv_bytes_per_token(CONFIG) * 4
    assert plan.memory_bytes == 10 * GB
    assert plan.context_tokens == 4096
    assert plan.pool_bytes == 10 * GB - resident - kv_bytes - (600 << 20) - (512 << 20)
    assert plan.slots == (plan.pool_bytes // 1_000_000,)
    assert plan.prefill_rows == 256  # pool and workspace hold every expert of a layer
    assert not plan.warnings


def test_the_default_is_a_share_of_ram() -> None:
    plan = derive(settings(), store_of([(0, 8, 2)]))
    assert plan.memory_bytes == int(RAM * 0.75)
    assert plan.reasons[0] == "memory=48.0 GB (75% of 64.0 GB (RAM))"


def test_reasons_name_each_derived_value() -> None:
    plan = derive(settings(memory="10GB", pool="25%"), store_of([(0, 64, 2)] * 2))
    text = "\n".join(plan.reasons)
    for value in ("memory=10.0 GB (flag --memory)", "context=4096", "pool=32.0 MB (flag --pool)", "slots=32 of 128"):
        assert value in text
    assert f"prefill={plan.prefill_rows}" in text


def test_the_pool_never_exceeds_the_experts() -> None:
    store = store_of([(0, 8, 2)] * 2)
    assert pool_of("50GB", store).slots == (16,)
    assert pool_of("100%", store).slots == (16,)
    assert derive(settings(), store).slots == (16,)


def test_little_memory_shortens_the_context() -> None:
    store = store_of([(0, 8, 2)], max_position_embeddings=1_000_000)
    plan = derive(settings(memory="4GB"), store)
    assert plan.context_tokens == int(4 * GB * 0.125) // (4 * kv_bytes_per_token(CONFIG))


@pytest.mark.parametrize(
    ("changes", "n_layers"),
    [
        ({}, 4),
        ({"full_attention_interval": 4, "num_hidden_layers": 48}, 12),
        ({"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}, 2),
        ({"layer_types": ["sliding_attention", "full_attention"]}, 2),
        ({"layer_types": ["linear_attention"] * 4}, 0),
    ],
)
def test_kv_counts_layers_of_full_attention(changes: dict[str, Any], n_layers: int) -> None:
    assert kv_bytes_per_token({**CONFIG, **changes}) == n_layers * 2 * 2 * 64 * 4
    plan = derive(settings(), store_of([(0, 8, 2)], **changes))
    assert plan.context_tokens == 4096


def test_kv_without_its_keys_follows_the_attention_heads() -> None:
    assert kv_bytes_per_token({"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64}) == 2 * 4 * 16 * 4


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"65\.0 GB asked for, but RAM gives 64\.0 GB; lower SPARKLE_MEMORY"):
        derive(settings(memory="65GB"), store_of([(0, 8, 2)]))
    with pytest.raises(ConfigError, match=r"asked for, but RAM gives 64\.0 GB"):
        pool_of("64GB", store_of([(0, 512, 10)] * 200))


def test_too_little_memory_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as caught:
        derive(settings(memory="1.2GB"), store_of([(0, 512, 10)] * 4))
    text = str(caught.value)
    for part in ("memory 1.2 GB", "weights 115 MB", "workspace 537 MB", "processes 629 MB", "needs 12.0 MB"):
        assert part in text, text
    assert "12 of 1.0 MB: top_k experts of a layer and 2 reads under way" in text
    assert "raise SPARKLE_MEMORY (or SPARKLE_POOL)" in text


@pytest.mark.parametrize(
    ("layers", "least"),
    [
        ([(0, 512, 10)], 12),
        ([(0, 512, 10), (0, 512, 4)], 12),  # the largest layer decides
        ([(0, 8, 8)], 8),  # there are no more
        ([(0, 9, 8)], 9),
        ([(0, 2, 1), (0, 2, 1)], 3),
    ],
)
def test_the_smallest_pool_holds_one_step(layers: list[tuple[int, int, int]], least: int) -> None:
    store = store_of(layers)
    plan = pool_of(str(least * 1_000_000), store)
    assert plan.slots == (least,)
    assert plan.prefill_rows >= 1
    with pytest.raises(ConfigError, match="cannot hold one step"):
        pool_of(str(least * 1_000_000 - 1), store)


def test_following_a_refusal_is_enough() -> None:
    """The size that it names is rounded up: asked for, it is accepted."""
    odd = layout_class("odd", [("up_proj.weight", "U8", (52_224,))], {})
    store = store_of([(0, 8, 2)] * 2, [odd])
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            pool_of("1kB", store)
        named = re.search(r"needs ([\d.]+ [kMG]B)", str(caught.value))
        assert named
        assert pool_of(named[1], store).slots[0] >= 4
        store = store_of([(0, 64, 34)] * 2, [odd])  # 1.88 MB


def test_classes_share_the_pool_by_what_they_lack() -> None:
    small = layout_class("small", [("up_proj.weight", "U8", (1000,))], {})
    store = store_of([(0, 100, 4)] * 9 + [(1, 100, 4)], [MB_CLASS, small])
    least = 6 * 1_000_000 + 6 * 1000
    assert pool_of(str(least), store).slots == (6, 6)
    with pytest.raises(ConfigError, match=r"6 of 1\.0 MB \+ 6 of 1 kB"):
        pool_of(str(least - 1), store)
    half = pool_of("50%", store).slots
    assert 445 <= half[0] <= 450
    assert 45 <= half[1] <= 60
    assert half[0] * 1_000_000 + half[1] * 1000 <= 450_050_000


def test_drafter_layers_have_no_slots() -> None:
    store = store_of([(0, 16, 2), (1, 16, 2)], [MB_CLASS, MB_CLASS], kinds="md")
    assert pool_of("100%", store).slots == (16, 0)


# --- prefill ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "slots", "rows"),
    [
        ([(0, 512, 10)], 12, 1),
        ([(0, 512, 10)], 31, 2),  # 20 + 2 for two rows, 32 for three
        ([(0, 512, 10)], 32, 3),
        ([(0, 512, 10)], 511, 50),
        ([(0, 64, 8)] * 2, 65, 7),
        ([(0, 64, 8)] * 2, 66, 256),  # every expert of a layer fits beside background reads: any row count does
        ([(0, 8, 8)], 8, 256),
        ([(0, 1024, 2)] * 2, 2000, 256),
    ],
)
def test_prefill_rows_fit_the_pool_whatever_the_router_chooses(
    layers: list[tuple[int, int, int]], slots: int, rows: int
) -> None:
    assert pool_of(str(slots * 1_000_000), store_of(layers)).prefill_rows == rows


def test_prefill_rows_fit_the_workspace() -> None:
    large = layout_class("large", [("up_proj.weight", "U8", (10_000_000,))], {})
    plan = pool_of("100%", store_of([(0, 512, 10)] * 2, [large]))
    assert plan.prefill_rows == (512 << 20) // 10_000_000 // 10


def test_a_pool_below_one_tokens_experts_is_warned_of() -> None:
    store = store_of([(0, 64, 8)] * 10)
    assert pool_of("80000000", store).warnings == ()
    [warning] = pool_of("79999999", store).warnings
    assert warning.startswith("79 slots are fewer than one token's 80 experts")


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 8), st.booleans()), min_size=1, max_size=6), st.data())
def test_an_accepted_pool_holds_any_step(layers: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    small = layout_class("small", [("up_proj.weight", "U8", (1000,))], {})
    made = [(int(is_small), n, min(k, n)) for n, k, is_small in layers]
    store = store_of(made, [MB_CLASS, small])
    n_bytes = data.draw(st.integers(1, 300_000_000))
    try:
        plan = pool_of(str(n_bytes), store)
    except ConfigError:
        return
    sizes = [layout.record_bytes for layout in store.classes]
    experts = sum(sizes[c] * n for c, n, _ in made)
    assert sum(n * size for n, size in zip(plan.slots, sizes, strict=True)) <= min(n_bytes, experts)
    for c, n, k in made:
        assert min(n, plan.prefill_rows * k) <= plan.slots[c] <= sum(x for i, x, _ in made if i == c)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 kB"),
        (999, "1 kB"),
        (52_224, "52 kB"),
        (1e6, "1.0 MB"),
        (123e6, "123 MB"),
        (1.25e9, "1.2 GB"),
        (77e9, "77.0 GB"),
    ],
)
def test_sizes_for_people(n_bytes: float, text: str) -> None:
    assert gb(n_bytes) == text
