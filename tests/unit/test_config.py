"""Settings: which source wins, what each value may be, and errors that name key, value and what is allowed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sparkle import config
from sparkle.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sparkle.toml of the checkout takes part."""
    monkeypatch.chdir(tmp_path)


def test_precedence(tmp_path: Path) -> None:
    (tmp_path / "sparkle.toml").write_text('max_active = 2\nmax_queue = 3\nmax_sessions = 5\nlog_level = "debug"\n')
    environ = {"SPARKLE_MAX_ACTIVE": "6", "SPARKLE_MAX_QUEUE": "7"}
    settings = config.load({"max_active": "8", "max_queue": None}, environ)
    assert (settings.max_active, settings.origins["max_active"]) == (8, "flag --max-active")
    assert (settings.max_queue, settings.origins["max_queue"]) == (7, "variable SPARKLE_MAX_QUEUE")
    assert (settings.max_sessions, settings.origins["max_sessions"]) == (5, "file sparkle.toml")
    assert (settings.read_depth, settings.origins["read_depth"]) == (0, "default")
    assert set(settings.origins) == set(config.setting_names())


def test_every_default_is_valid_and_every_setting_documented() -> None:
    settings = config.load(environ={})
    for name in config.setting_names():
        assert settings.origins[name] == "default"
        assert config.setting_doc(name)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("memory", "24GB", 24_000_000_000),
        ("memory", "512MiB", 512 << 20),
        ("memory", "1.5g", 1_500_000_000),
        ("memory", "1000000", 1_000_000),
        ("memory", "2 KiB", 2048),
        ("pool", "25%", "25%"),
        ("pool", "12.5%", "12.5%"),
        ("pool", "3GiB", "3GiB"),
        ("pool", "", ""),
        ("checksum_frac", "1", 1.0),
        ("read_depth", " 8 ", 8),
        ("device", "cpu", "cpu"),
        ("run_dir", "/tmp/x", Path("/tmp/x")),
        ("model", "~/m", Path.home() / "m"),
    ],
)
def test_values(name: str, text: str, value: Any) -> None:
    assert getattr(config.load({name: text}, {}), name) == value


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("memory", "lots", "a size such as 24GB"),
        ("memory", "-1", "a size"),
        ("memory", "1e9", "a size"),
        ("memory", "9" * 400, "a size"),
        ("pool", "0%", "between 0% and 100%"),
        ("pool", "101%", "between 0% and 100%"),
        ("pool", "half", "a size"),
        ("device", "GPU", "one of auto, cpu, gpu"),
        ("io", "", "one of"),
        ("read_depth", "65", "an integer from 0 to 64"),
        ("read_depth", "3.0", "an integer"),
        ("max_active", "0", "from 1 to 64"),
        ("checksum_frac", "nan", "from 0 to 1"),
        ("checksum_frac", "1.01", "from 0 to 1"),
        ("run_dir", "", "a path"),
    ],
)
def test_malformed_values_name_key_value_and_what_is_allowed(name: str, text: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load({}, {"SPARKLE_" + name.upper(): text})
    message = str(caught.value)
    assert message.startswith(f"{name} = {text!r} (variable SPARKLE_{name.upper()}): expected ")
    assert allowed in message


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"unknown variable SPARKLE_MEMROY.*SPARKLE_MEMORY"):
        config.load({}, {"SPARKLE_MEMROY": "1GB"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("memroy = 1", "unknown key 'memroy'"),
        ("memory = [1]", "'memory' must be text or a number"),
        ("memory = true", "'memory' must be text or a number"),
        ("memory = ", "cannot read"),
        ('memory = "lots"', r"memory = 'lots' \(file .*\): expected a size"),
        ("\ufeff=", "cannot read"),
    ],
)
def test_a_malformed_file(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "other.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint) as caught:
        config.load({}, {"SPARKLE_CONFIG": str(path)})
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        config.load({}, {"SPARKLE_CONFIG": str(path)})


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        config.load({}, {"SPARKLE_CONFIG": str(tmp_path / "absent.toml")})


def test_default_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert config.load(environ={}).run_dir == tmp_path / "sparkle"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    assert config.load(environ={}).run_dir == Path(f"/tmp/sparkle-{os.getuid()}")
