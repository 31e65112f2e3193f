"""Adds CMake and Ninja from pip to setuptools' backend, if setup.py needs them and the machine lacks them."""
import os
import pathlib
import shutil

from setuptools.build_meta import *  # noqa: F401,F403
from setuptools.build_meta import get_requires_for_build_wheel as _get_requires

HERE = pathlib.Path(__file__).resolve().parent
# The library's sources: a copy in a source archive, or the root of the checkout.
SOURCE = HERE / "source" if (HERE / "source").is_dir() else HERE.parents[1]


def library() -> "pathlib.Path | None":
    """Returns a library that is already built, or None."""
    chosen = os.environ.get("GRADWIRE_LIBRARY")
    if chosen:
        return pathlib.Path(chosen).resolve(strict=True)
    built = SOURCE / "build" / "lib" / "libgradwire.so"
    return built.resolve() if built.exists() else None


def get_requires_for_build_wheel(config_settings=None):
    tools = [] if library() else ["cmake", "ninja"]
    return [*_get_requires(config_settings), *(tool for tool in tools if shutil.which(tool) is None)]


get_requires_for_build_editable = get_requires_for_build_wheel
