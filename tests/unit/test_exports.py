"""The public names of `sparkle`."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest

import sparkle
from sparkle import errors

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


def test_all_is_complete_and_sorted() -> None:
    assert list(sparkle.__all__) == sorted(sparkle.__all__)
    every_error = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert set(sparkle.__all__) == every_error | {"AsyncClient", "Client", "__version__"}
    assert dir(sparkle) == sparkle.__all__


@pytest.mark.parametrize("name", sparkle.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(sparkle, name)
    if inspect.isclass(value):
        assert value.__name__ == name
        assert name in (errors.__doc__ or "") if issubclass(value, Exception) else value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        _ = sparkle.Clinet


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sparkle.__version__ == project["version"]


def test_error_codes_are_distinct_and_come_back_as_their_class() -> None:
    classes = [v for v in vars(errors).values() if inspect.isclass(v) and issubclass(v, errors.SparkleError)]
    assert len({cls.code for cls in classes}) == len(classes)
    for cls in classes:
        assert type(errors.from_code(cls.code, "because")) is cls
    unknown = errors.from_code("from the future", "because")
    assert (type(unknown), str(unknown)) == (errors.SparkleError, "from the future: because")
