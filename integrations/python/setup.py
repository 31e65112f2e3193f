"""Builds the package, including libgradwire.so.

The library is the file in GRADWIRE_LIBRARY, or the source tree's build/lib/libgradwire.so. If there is none,
its host side is compiled, which takes a compiler, CMake, Ninja and fmt. CMAKE_ARGS adds CMake arguments:
CMAKE_ARGS=-DGRADWIRE_CUDA=ON adds the CUDA side, with nvcc. A source archive includes the library's sources.
"""
import ctypes
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.dist import Distribution

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

from build_backend import HERE, SOURCE, library

HEADER = SOURCE / "include" / "gradwire" / "gradwire.h"
# What CMake needs to compile the library.
LIBRARY_SOURCES = ("CMakeLists.txt", "LICENSE", "cmake", "include", "runtime", "kernels", "collectives")

if not os.access(HERE, os.W_OK):
    sys.exit(f"gradwire: {HERE} is not writable by this user; install from a copy, or a wheel (make wheel)")
os.umask(0o022)  # all users can read packages


def share(folder: pathlib.Path) -> None:
    """Makes files with the modes of a private checkout readable for all users."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def version() -> str:
    if HEADER.exists():
        return ".".join(re.findall(r"#define GW_VERSION_\w+ (\d+)", HEADER.read_text()))
    number = ctypes.CDLL(str(library())).gw_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def compiled(folder: pathlib.Path) -> pathlib.Path:
    if not HEADER.exists():
        sys.exit("gradwire: there is no libgradwire.so, and no source tree to compile it from: install from "
                 "a checkout of Gradwire, or set GRADWIRE_LIBRARY to a library")
    configure = ["cmake", "-S", SOURCE, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                 "-DGRADWIRE_TESTS=OFF", "-DGRADWIRE_LIBRARY_ONLY=ON", "-DGRADWIRE_CUDA=OFF",
                 *shlex.split(os.environ.get("CMAKE_ARGS", ""))]  # the last -DGRADWIRE_CUDA counts
    print("gradwire: compiling libgradwire.so, about three minutes on two cores; with its CUDA side "
          "(CMAKE_ARGS=-DGRADWIRE_CUDA=ON, which needs nvcc) six", flush=True)
    try:
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", folder, "--target", "gradwire_shared"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"gradwire: libgradwire.so could not be built ({error}). It needs a C++20 compiler and fmt: "
                 "apt install g++ libfmt-dev; with CMAKE_ARGS=-DGRADWIRE_CUDA=ON also CUDA 13's nvcc")
    return folder / "lib" / "libgradwire.so"


def copy_pages(folder: pathlib.Path) -> None:
    """Copies the pages that messages name: docs/*.md."""
    folder.mkdir(exist_ok=True)
    for page in (SOURCE / "docs").glob("*.md"):
        shutil.copy2(page, folder)


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        if getattr(self, "editable_mode", False):  # the package looks in a checkout's build/lib, or itself
            checkout = HEADER.exists() and SOURCE != HERE / "source"
            place = SOURCE / "build/lib/libgradwire.so" if checkout else HERE / "gradwire/libgradwire.so"
            found = library() or compiled(SOURCE / "build" / "python")
            if not place.exists():
                place.unlink(missing_ok=True)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(found)
            return
        target = pathlib.Path(self.build_lib, "gradwire")
        found = library() or compiled(pathlib.Path(self.build_lib).resolve().parent / "library")
        shutil.copy2(found, target / "libgradwire.so")
        copy_pages(target / "docs")
        (target / "_version.py").write_text(
            f'"""Made by setup.py from gradwire.h."""\n__version__ = "{version()}"\n')


class SdistWithSources(sdist):
    def make_release_tree(self, base_dir, files) -> None:
        super().make_release_tree(base_dir, files)
        target = pathlib.Path(base_dir)
        shutil.copy2(HERE / "build_backend.py", target)
        shutil.copytree(HERE / "examples", target / "examples")
        for name in LIBRARY_SOURCES:
            if (SOURCE / name).is_dir():
                shutil.copytree(SOURCE / name, target / "source" / name,
                                ignore=shutil.ignore_patterns(".*", "__pycache__", "*.orig", "*.rej", "*~"))
            else:
                (target / "source").mkdir(exist_ok=True)
                shutil.copy2(SOURCE / name, target / "source")
        copy_pages(target / "source" / "docs")
        share(target)


class AnyPython(bdist_wheel):
    """Builds one wheel for every Python version: nothing in it is compiled against Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]

    def write_wheelfile(self, folder, **keywords) -> None:
        super().write_wheelfile(folder, **keywords)
        share(pathlib.Path(folder).parent)


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:  # a wheel with a library is platform-specific
        return True


setup(version=version(), license="Apache-2.0", distclass=PlatformDistribution,
      cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": AnyPython, "sdist": SdistWithSources})
