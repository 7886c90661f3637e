"""Installed packages are as new as pyproject.toml requires: pip may settle for an older one that it can build."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest installs tomli
    import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
pytestmark = pytest.mark.skipif(not PYPROJECT.exists(), reason="needs the source tree")


def requirements_of(project: dict, *extras: str) -> list[Requirement]:
    """The project's requirements with these extras, and with the extras that they name."""
    found = [Requirement(line) for line in project["dependencies"]]
    for line in (line for extra in extras for line in project["optional-dependencies"][extra]):
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            found += requirements_of(project, *requirement.extras)
        elif requirement.marker is None or requirement.marker.evaluate():
            found.append(requirement)
    return found


def problem(requirement: Requirement) -> str | None:
    """Why the installed package does not meet the requirement, or None if it does."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement} is not installed"
    if not requirement.specifier.contains(installed, prereleases=True):
        return f"{requirement.name} is {installed}; pyproject.toml asks for {requirement.specifier}"
    return None


def test_installed_packages_are_as_new_as_pyproject_asks():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert [problem(r) for r in requirements_of(project, "test") if problem(r)] == []


def test_extras_that_name_extras_and_markers_are_followed():
    extras = {"a": ["this[b]", "x>=1"], "b": ["y>=2"], "c": ["z; python_version < '3'"]}
    project = {"name": "this", "dependencies": ["w"], "optional-dependencies": extras}
    assert {str(r) for r in requirements_of(project, "a", "c")} == {"w", "x>=1", "y>=2"}


@pytest.mark.parametrize(
    "line, expected",
    [("pytest>=9999", r"pytest is .+; .* asks for >=9999"), ("no-such-package", "no-such-package is not installed")],
)
def test_what_is_too_old_or_missing_is_found(line, expected):
    assert re.fullmatch(expected, problem(Requirement(line)))
