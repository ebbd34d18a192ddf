"""Puts the templates of `rollpacker init` into the wheel. All else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TEMPLATES = ("configs", "examples")


class BuildWithTemplates(build_py):
    """An installed package has the two folders inside; in a checkout they lie at the top."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        made = Path(self.build_lib, "rollpacker", "templates")
        shutil.rmtree(made, ignore_errors=True)
        for folder in TEMPLATES:
            shutil.copytree(folder, made / folder, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithTemplates})
