"""The README tells the truth: its marked commands run, the others parse, its files and packages are there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from openk3.cli import app
from openk3.train.recipe import load_recipe, parse_override

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(info: str) -> list[str]:
    """Contents of the fenced blocks with exactly this info string: "bash run" are run, "bash" are shown."""
    return re.findall(rf"^```{info}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def commands(program: str, *infos: str) -> list[list[str]]:
    """The calls of a program in those blocks, as argument lists without the program."""
    lines = [
        shlex.split(line, comments=True) for info in infos for block in blocks(info) for line in block.splitlines()
    ]
    return [words[1:] for words in lines if words and words[0] == program]


def test_marked_commands_run(tmp_path):
    assert blocks("bash run")
    shutil.copytree(ROOT / "openk3", tmp_path / "openk3", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for block in blocks("bash run"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}"


@pytest.mark.parametrize("words", commands("openk3", "bash"), ids=" ".join)
def test_shown_commands_parse(words):
    group = typer.main.get_command(app)
    verb = group.commands[words[0]]
    values = verb.make_context(words[0], words[1:]).params
    if "recipe" in values:
        load_recipe(values["recipe"], values["set_"] or [])
    for override in values.get("set_") or []:
        parse_override(override)


@pytest.mark.parametrize("words", commands("make", "bash", "bash run"), ids=" ".join)
def test_make_targets_exist(words):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "-n", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_tour_and_test_are_shown():
    assert {"tour", "test"} <= {words[0] for words in commands("make", "bash")}


def test_tree_names_what_exists():
    (tree,) = blocks("text")
    parents: list[str] = []
    for line in tree.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:depth], name]
        path = ROOT.joinpath(*parents)
        assert path.is_dir() if name.endswith("/") else path.is_file(), f"README names {path.relative_to(ROOT)}"


def test_tree_names_every_package():
    packages = {file.parent.name for file in (ROOT / "openk3").glob("*/__init__.py")}
    assert {name for name in packages if f"\n  {name}/ " not in README} == set()


def test_dependencies_are_the_declared_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=!~;\[ ]", requirement)[0] for requirement in project["dependencies"]}
    assert set(re.findall(r"^\| ([a-z]+) \| ", README, flags=re.MULTILINE)) - {"package"} == declared
