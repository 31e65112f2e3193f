"""Adds CMake and Ninja from pip to setuptools' backend, if setup.py needs them and the machine lacks them."""
import os
import pathlib
import shutil

from setuptools.build_meta import *  # noqa: F401,F403
from setuptools.build_meta import get_requires_for_build_wheel as _get_requires

_BUILT = pathlib.Path(__file__).resolve().parents[2] / "build" / "lib" / "libgradwire.so"


def get_requires_for_build_wheel(config_settings=None):
    tools = [] if os.environ.get("GRADWIRE_LIBRARY") or _BUILT.exists() else ["cmake", "ninja"]
    return [*_get_requires(config_settings), *(tool for tool in tools if shutil.which(tool) is None)]
