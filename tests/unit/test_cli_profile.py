"""`sparkle-ctl profile`: what it shows, and what it does to files."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sparkle import manifest, safetensors_header
from sparkle.cli import ctl
from sparkle.errors import ConfigError, StorageError
from sparkle.manifest import ExpertLayer, FileSum, expert_header, layout_class
from sparkle.profile import UsageProfile, load, profile_path
from sparkle.store import Store, checksum, expert_file
from sparkle.trace import Event

pytestmark = pytest.mark.unit

N_EXPERTS = 20
FORM = layout_class("f32", [("gate_proj.weight", "F32", (64, 64))], {})


def write_store(root: Path, n_layers: int = 2) -> Store:
    """Write a store of plain experts that are all zero."""
    (root / "experts").mkdir(parents=True)
    layers, header = [], expert_header(FORM, N_EXPERTS)
    for i in range(n_layers):
        (root / expert_file(i)).write_bytes(header + bytes(N_EXPERTS * FORM.stride_bytes))
        module = f"model.layers.{i}.mlp.switch_mlp"
        sums = (checksum(bytes(FORM.record_bytes)),) * N_EXPERTS
        layers.append(ExpertLayer(i, module, "main", 0, N_EXPERTS, 2, expert_file(i), len(header), sums))
    contents = {
        "resident.safetensors": safetensors_header.encode([("norm.weight", "F32", (4,))], {}) + bytes(16),
        "config.json": b'{"model_type": "x"}',
    }
    for name, data in contents.items():
        (root / name).write_bytes(data)
    files = {name: FileSum(len(data), checksum(data)) for name, data in contents.items()}
    (root / "sparkle.json").write_text(json.dumps(manifest.to_json([FORM], layers, {}, files, {})))
    return Store.open(root)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(tmp_path_factory.mktemp("models") / "tiny.store")


@pytest.fixture(autouse=True)
def recorded(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Settings of this test's own; returns where usage is recorded."""
    with tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as run_dir:  # short enough for a socket
        monkeypatch.setenv("SPARKLE_RUN_DIR", run_dir)
        monkeypatch.setenv("SPARKLE_STATE_DIR", str(tmp_path / "state"))
        monkeypatch.setenv("SPARKLE_MODEL", str(store.path))
        yield profile_path(tmp_path / "state", store.fingerprint)


def ctl_profile(*args: str | Path) -> str:
    result = CliRunner().invoke(ctl.command, ["profile", *map(str, args)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


def used(store: Store, experts: list[int], n_tokens: int) -> UsageProfile:
    profile = UsageProfile.for_store(store)
    for step in range(n_tokens):
        for layer in store.layers:
            profile.observe(Event(step, 0, 0, 1, 0, layer.index, experts, [True] * len(experts)))
    return profile


def row(screen: str, label: str) -> str:
    return next(line for line in screen.splitlines() if line.startswith(label + " "))


# --- show -----------------------------------------------------------------------------------------------------------


def test_show(store: Store, recorded: Path) -> None:
    profile = used(store, [3, 4], 300)
    profile.merge(used(store, [3, 5], 100))
    profile.save(recorded)
    screen = ctl_profile("show")
    assert "tiny.store" in screen
    assert "400 seen" in row(screen, "tokens") and "half-life 16,384 tokens" in row(screen, "tokens")
    assert "0 s ago" in row(screen, "saved")
    assert "6 used" in row(screen, "experts") and "15.0 % of 40 in 2 layers" in row(screen, "experts")
    assert "10 % " in row(screen, "hottest") and "87.5 % of uses" in row(screen, "hottest")  # 3 and 4, in both layers
    assert screen.count("100.0 % of uses") == 2
    assert "100.0 %" in row(screen, "top") and "layer 0, expert 3" in row(screen, "top")
    assert max(map(len, screen.splitlines())) <= 80
    assert "\x1b" not in screen


def test_show_as_json(store: Store, recorded: Path) -> None:
    used(store, [3, 4], 300).save(recorded)
    facts: dict[str, Any] = json.loads(ctl_profile("show", "--json"))
    assert (facts["model"], facts["fingerprint"], facts["file"]) == ("tiny.store", store.fingerprint, str(recorded))
    assert (facts["tokens"], facts["experts"], facts["experts_used"]) == (300, 40, 4)
    assert facts["coverage"][0] == {"experts_frac": 0.1, "uses_frac": 1.0}
    assert facts["hottest"][0] == {"layer": 0, "expert": 3, "share": 1.0}
    assert 0 <= facts["age_s"] < 60


def test_show_a_file_needs_no_store(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used(store, [1, 2], 5).save(tmp_path / "mine.json")
    monkeypatch.setenv("SPARKLE_MODEL", str(tmp_path / "nowhere"))
    assert "5 seen" in ctl_profile("show", tmp_path / "mine.json")


def test_show_another_store(store: Store, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used(store, [1, 2], 5).save(recorded)
    monkeypatch.setenv("SPARKLE_MODEL", str(tmp_path / "nowhere"))
    assert "5 seen" in ctl_profile("show", "--model", store.path)


def test_nothing_recorded(recorded: Path) -> None:
    with pytest.raises(StorageError, match=f"{recorded}: no usage of tiny.store is recorded"):
        ctl_profile("show")
    with pytest.raises(StorageError, match="no usage"):
        ctl_profile("export", recorded.with_name("new.json"))
    assert "nothing was recorded" in ctl_profile("reset")


def test_an_empty_profile_can_be_shown(store: Store, recorded: Path) -> None:
    UsageProfile.for_store(store).save(recorded)
    assert "0 used" in row(ctl_profile("show"), "experts")


# --- carry ----------------------------------------------------------------------------------------------------------


def test_export_and_import_elsewhere(
    store: Store, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used(store, [3, 4], 20).save(recorded, saved_at=1e9)
    assert "20 tokens" in ctl_profile("export", tmp_path / "out.json")
    assert load(tmp_path / "out.json").saved_at == 1e9  # its age is that of what it says
    monkeypatch.setenv("SPARKLE_STATE_DIR", str(tmp_path / "elsewhere"))
    assert "taken over for tiny.store, 20 tokens" in ctl_profile("import", tmp_path / "out.json")
    assert load(tmp_path / "elsewhere" / recorded.name).usage() == load(recorded).usage()


def test_export_overwrites_nothing(store: Store, recorded: Path, tmp_path: Path) -> None:
    used(store, [3, 4], 20).save(recorded)
    (tmp_path / "notes.txt").write_text("dear diary")
    with pytest.raises(ConfigError, match="exists"):
        ctl_profile("export", tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="exists"):
        ctl_profile("merge", recorded, "--output", tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "dear diary"


@pytest.mark.parametrize(
    ("option", "share", "n_tokens"), [([], 0.25, 40), (["--merge"], 0.25, 40), (["--replace"], 1, 10)]
)
def test_import_adds_unless_told_to_replace(
    store: Store, recorded: Path, tmp_path: Path, option: list[str], share: float, n_tokens: int
) -> None:
    used(store, [3, 4], 30).save(recorded)
    used(store, [3, 5], 10).save(tmp_path / "in.json")
    ctl_profile("import", tmp_path / "in.json", *option)
    assert load(recorded).share((1, 5)) == pytest.approx(share, abs=0.001)
    assert load(recorded).n_tokens == n_tokens


def test_import_refuses_another_models(store: Store, recorded: Path, tmp_path: Path) -> None:
    other = write_store(tmp_path / "other.store", n_layers=1)
    used(other, [1, 2], 5).save(tmp_path / "in.json")
    with pytest.raises(ConfigError, match=f"another model: other.store, fingerprint {other.fingerprint}.*tiny.store"):
        ctl_profile("import", tmp_path / "in.json")
    assert not recorded.exists()


def test_import_does_not_destroy_a_damaged_record(store: Store, recorded: Path, tmp_path: Path) -> None:
    used(store, [1, 2], 5).save(tmp_path / "in.json")
    recorded.parent.mkdir()
    recorded.write_text("{}")
    with pytest.raises(StorageError, match="Move it away"):
        ctl_profile("import", tmp_path / "in.json")
    assert recorded.read_text() == "{}"


@pytest.mark.parametrize("command", [["import"], ["import", "--replace"], ["reset"]])
def test_a_running_prefetch_daemon_is_not_worked_against(
    store: Store, recorded: Path, tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used(store, [1, 2], 5).save(recorded)
    used(store, [3, 4], 7).save(tmp_path / "in.json")
    with (
        tempfile.TemporaryDirectory(prefix="spk-", dir="/tmp") as run_dir,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon,
    ):
        daemon.bind(f"{run_dir}/prefetch.sock")
        daemon.listen()
        file = [str(tmp_path / "in.json")] if command[0] == "import" else []
        args = [*command, *file, "--run-dir", run_dir]
        with pytest.raises(ConfigError, match=f"runs in {run_dir} .*stop it first"):
            ctl_profile(*args)
        assert load(recorded).n_tokens == 5
    ctl_profile(*args)  # it has ended
    assert not recorded.exists() or load(recorded).n_tokens in (7, 12)


# --- combine and forget ---------------------------------------------------------------------------------------------


def test_merge_files(store: Store, tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.json" for i in range(3)]
    for file, expert, n in zip(files, (4, 5, 6), (60, 20, 20), strict=True):
        used(store, [3, expert], n).save(file)
    ctl_profile("merge", *files, "--output", tmp_path / "all.json")
    merged = load(tmp_path / "all.json")
    assert merged.n_tokens == 100 and merged.model == "tiny.store"
    assert [merged.share((0, e)) for e in (3, 4, 5, 6)] == pytest.approx([1, 0.6, 0.2, 0.2], abs=0.002)


def test_merge_refuses_a_mixture(store: Store, tmp_path: Path) -> None:
    used(store, [1, 2], 5).save(tmp_path / "a.json")
    used(write_store(tmp_path / "other.store", n_layers=1), [1, 2], 5).save(tmp_path / "b.json")
    with pytest.raises(ConfigError, match=r"b\.json is of another model: other\.store"):
        ctl_profile("merge", tmp_path / "a.json", tmp_path / "b.json", "--output", tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


def test_reset(store: Store, recorded: Path) -> None:
    used(store, [1, 2], 5).save(recorded)
    assert "removed" in ctl_profile("reset")
    assert not recorded.exists()
