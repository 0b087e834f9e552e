"""Runs the `lmhead` command that the build left, for tests."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def path(variable="LMHEAD_COMMAND", default="build/release/lmhead"):
    """Where the command is: the environment says, else the release build."""
    command = pathlib.Path(os.environ.get(variable, ROOT / default))
    if not command.exists():
        pytest.skip(f"{command} is not built", allow_module_level=True)
    return str(command)


def run(*arguments, command=None, **options):
    return subprocess.run(
        [command or path(), *map(str, arguments)], capture_output=True, text=True, timeout=120, **options
    )
