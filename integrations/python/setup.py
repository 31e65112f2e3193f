"""Installs libgradwire.so with the package: from GRADWIRE_LIBRARY, or from the source tree's build folder.

If there is neither, only the package is installed, and looks for the library at run time.
"""
import os
import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution


def library() -> "pathlib.Path | None":
    chosen = os.environ.get("GRADWIRE_LIBRARY")
    if chosen:
        return pathlib.Path(chosen).resolve(strict=True)
    built = pathlib.Path(__file__).resolve().parents[2] / "build" / "lib" / "libgradwire.so"
    return built.resolve() if built.exists() else None


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        found = library()
        if found is not None:
            shutil.copy2(found, pathlib.Path(self.build_lib, "gradwire", "libgradwire.so.0"))


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:  # a wheel with a library is platform-specific
        return library() is not None


setup(cmdclass={"build_py": BuildWithLibrary}, distclass=PlatformDistribution)
