"""Packages of the wheel. The recipes stand at the top of the repository and travel as `openk3/recipes`."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["openk3", "openk3.*"]), "openk3.recipes"],
    package_dir={"openk3.recipes": "recipes"},
    package_data={"openk3.recipes": ["*.toml"]},
)
