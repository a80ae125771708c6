"""An installed openk3 is whole, and the lock is what pyproject.toml asks for."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the sources, with the setuptools that is installed."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("openk3", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", target, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return next(target.glob("*.whl"))


def test_wheel_holds_all_code_and_the_recipes(wheel):
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "openk3").rglob("*.py")}
    recipes = {f"openk3/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    assert recipes
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == code | recipes


def test_installed_package_finds_recipes_by_name(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "import sys; sys.path.insert(0, 'site'); import openk3; from openk3.train.recipe import load_recipe; "
        "print(openk3.__file__, load_recipe('nano').size)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    file, size = done.stdout.split()
    assert Path(tmp_path, file).is_relative_to(tmp_path / "site")
    assert size == "nano"


def test_lock_pins_what_is_asked_for():
    pins = {}
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            (exact,) = pin.specifier
            assert exact.operator == "==", line
            pins[canonicalize_name(pin.name)] = exact.version
    assert pins["torch"] == "2.13.0"
    for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]:
        asked = Requirement(text)
        assert asked.specifier.contains(pins[canonicalize_name(asked.name)]), text
