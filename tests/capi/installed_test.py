#!/usr/bin/env python3
"""Installs the library below the build folder, then builds and runs the examples against it outside the tree:
with find_package(gradwire), and with the flags of gradwire.pc (through pkg-config where it is installed). Adds
the sources to another project with add_subdirectory().
"""
import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integrations"))
from launch import free_port  # noqa: E402


def run(*command: object, **keywords: object) -> str:
    print("+", *command, flush=True)
    done = subprocess.run([str(c) for c in command], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, **keywords)
    print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        sys.exit(f"FAILED: exit code {done.returncode}")
    return done.stdout


PROJECT = """cmake_minimum_required(VERSION 3.24)
project(app CXX)
add_subdirectory("{source}" engine)
add_executable(app app.cpp)
target_link_libraries(app gradwire::gradwire)
"""


def check_subproject(cmake: str, source: pathlib.Path, folder: pathlib.Path) -> None:
    """Adds the sources to another project, without a folder that ccache can write, and compiles two files."""
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(PROJECT.format(source=source))
    (folder / "app.cpp").write_text("#include <gradwire/gradwire.h>\nint main() { return gw_version(); }\n")
    build = folder / "build"
    without_ccache = {**os.environ, "CCACHE_DIR": "/dev/null/ccache"}
    run(cmake, "-G", "Ninja", "-S", folder, "-B", build, "-DGRADWIRE_CUDA=OFF", "-DGRADWIRE_PCH=OFF",
        env=without_ccache)
    if "CMAKE_BUILD_TYPE:STRING=\n" not in (build / "CMakeCache.txt").read_text():
        sys.exit("FAILED: the project's build type was set")
    run(cmake, "--build", build, "--target", "CMakeFiles/app.dir/app.cpp.o",
        "engine/runtime/CMakeFiles/gradwire_runtime.dir/threads/thread.cpp.o", env=without_ccache)
    expected = {"CMakeCache.txt", "CMakeFiles", "build.ninja", "cmake_install.cmake", "engine", ".ninja_deps",
                ".ninja_log"}
    if not set(os.listdir(build)) <= expected:
        sys.exit(f"FAILED: files outside Gradwire's build folder: {set(os.listdir(build)) - expected}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("cmake", "build", "examples", "cc"):
        arguments.add_argument(f"--{name}", required=True)
    arguments.add_argument("--processes", choices=("yes", "no"), required=True,
                           help="can ranks be processes?")
    options = arguments.parse_args()
    prefix = pathlib.Path(options.build, "installed")
    shutil.rmtree(prefix, ignore_errors=True)
    run(options.cmake, "--install", options.build, "--prefix", prefix, "--component", "library", umask=0o077)
    private = [path for path in (prefix, *prefix.rglob("*")) if ~path.stat().st_mode & 0o444]
    if private or ~prefix.stat().st_mode & 0o111:
        sys.exit(f"FAILED: other users cannot read {private}")

    with tempfile.TemporaryDirectory() as folder:
        moved = pathlib.Path(folder, "moved")  # an installed tree may be moved
        shutil.copytree(prefix, moved, symlinks=True)
        examples = shutil.copytree(options.examples, pathlib.Path(folder, "examples"))
        build = pathlib.Path(folder, "build")
        run(options.cmake, "-S", examples, "-B", build, f"-DCMAKE_PREFIX_PATH={moved}",
            "-DCMAKE_BUILD_TYPE=Release")
        run(options.cmake, "--build", build)
        for example in ("allreduce", "overlap"):
            output = run(build / example, timeout=120)
            if "rank 0" not in output or "rank 1" not in output:
                sys.exit(f"FAILED: {example} did not report both ranks")

        if options.processes == "yes":
            for rendezvous in (f"tcp://127.0.0.1:{free_port()}", f"file://{folder}/meet"):
                for example in ("allreduce", "overlap"):
                    print("+", example, rendezvous, "as two processes", flush=True)
                    ranks = [subprocess.Popen([build / example, rendezvous,
                                               str(rank), "2"]) for rank in range(2)]
                    try:
                        codes = [rank.wait(timeout=120) for rank in ranks]
                    finally:
                        for rank in ranks:
                            rank.kill()
                    if any(codes):
                        sys.exit(f"FAILED: exit codes {codes}")

        pc, = moved.glob("**/gradwire.pc")
        if shutil.which("pkg-config"):
            flags = run("pkg-config", "--cflags", "--libs", "gradwire",
                        env={**os.environ, "PKG_CONFIG_PATH": str(pc.parent)}).split()
        else:
            print("no pkg-config here: its file is expanded by this script")
            text = pc.read_text().replace("${pcfiledir}", str(pc.parent))
            values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
            flags = " ".join(
                line.split(":", 1)[1] for line in text.splitlines() if line.startswith(("Cflags", "Libs")))
            for _ in range(3):
                for name, value in values.items():
                    flags = flags.replace("${%s}" % name, value)
            flags = flags.split()
        source = pathlib.Path(options.examples).resolve().parents[1]
        check_subproject(options.cmake, source, pathlib.Path(folder, "project"))
        program = pathlib.Path(folder, "with_pkg_config")
        run(options.cc, "-std=c++17", examples / "overlap.cpp", "-o", program, *flags, "-pthread")
        library_dir = next(moved.glob("**/libgradwire.so")).parent
        run(program, env={**os.environ, "LD_LIBRARY_PATH": str(library_dir)}, timeout=120)
    print("installed, found by find_package and by pkg-config, built and run outside the tree")


if __name__ == "__main__":
    main()
