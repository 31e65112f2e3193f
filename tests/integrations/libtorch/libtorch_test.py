#!/usr/bin/python3
"""Trains on two ranks with a C++ program that links LibTorch and libgradwire, in both orders and under ASan.

Also trains in Python processes that load LibTorch's symbols globally (TORCH_USE_RTLD_GLOBAL=1).

usage: libtorch_test.py LIBGRADWIRE [COMPILER]     run it with the Python that has the PyTorch to test
"""
from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Dict, List, Tuple

import torch
from torch.utils import cpp_extension

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import launch  # noqa: E402

LINE = re.compile(r"first (\S+) last (\S+) weights (\S+)")


def build(folder: pathlib.Path, library: pathlib.Path, compiler: str) -> List[pathlib.Path]:
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    include = HERE.parents[2] / "include"
    subprocess.run([
        compiler, "-std=c++20", "-O0", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *includes, f"-I{include}", "-c", HERE / "train.cpp", "-o", folder / "train.o"
    ], check=True, timeout=500)
    torch_folder = cpp_extension.library_paths()[0]
    theirs = [f"-L{torch_folder}", f"-Wl,-rpath,{torch_folder}", "-ltorch", "-ltorch_cpu", "-lc10"]
    programs = []
    for name, libraries in (("torch_first", [*theirs, library]), ("gradwire_first", [library, *theirs]),
                            ("torch_first_asan", ["-fsanitize=address", *theirs, library])):
        # LibTorch's libraries need CUDA's libraries, which LD_LIBRARY_PATH provides at run time.
        subprocess.run([
            compiler, folder / "train.o", "-Wl,--no-as-needed", *libraries, f"-Wl,-rpath,{library.parent}",
            "-Wl,--allow-shlib-undefined", "-o", folder / name], check=True, timeout=200)
        programs.append(folder / name)
    return programs


def run(command: List[str], environment: Dict[str, str]) -> List[str]:
    """Runs `command` on two ranks. Returns the output of each rank."""
    meeting = f"tcp://127.0.0.1:{launch.free_port()}"
    ranks = [
        subprocess.Popen([*command, meeting, str(rank), "2"], stdout=subprocess.PIPE, text=True,
                         env={**os.environ, "OMP_NUM_THREADS": "1", "GRADWIRE_THREADS": "1", **environment})
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, rank in enumerate(ranks):
        if rank.returncode != 0:
            sys.exit(f"FAILED: rank {number} of {command[0]} ended with {rank.returncode}: {outputs[number]}")
    return outputs


def trained(program: pathlib.Path) -> Tuple[float, float, float]:
    # ASan reports heap errors, but not leaks: LibTorch does not free all memory at exit.
    outputs = run([str(program)], {"ASAN_OPTIONS": "detect_leaks=0"})
    found = LINE.search(outputs[0])
    if found is None or outputs[0] != outputs[1]:
        sys.exit(f"FAILED: {program.name}: the ranks do not agree: {outputs}")
    first, last, weights = (float(value) for value in found.groups())
    if not 0 <= last < first / 5:
        sys.exit(f"FAILED: {program.name} does not learn: loss {first} to {last}")
    print(f"{program.name}: loss {first:.4f} to {last:.4f} in 100 steps, the same weights on both ranks",
          flush=True)
    return first, last, weights


PYTHON = """
import sys, torch, gradwire
with gradwire.Communicator(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])) as comm:
    print(comm.allreduce_(torch.ones(1000) * comm.rank, "fp32", "sum").sum().item())
"""


def main() -> None:
    library = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        programs = build(pathlib.Path(folder), library, sys.argv[2] if len(sys.argv) > 2 else "c++")
        results = [trained(program) for program in programs]
        if len(set(results)) > 1:
            sys.exit(f"FAILED: the order of linking changes the result: {results}")
    outputs = run([sys.executable, "-c", PYTHON], {"TORCH_USE_RTLD_GLOBAL": "1"})
    if [float(text) for text in outputs] != [1000, 1000]:
        sys.exit(f"FAILED: Python with TORCH_USE_RTLD_GLOBAL=1: {outputs}")
    print("Python with TORCH_USE_RTLD_GLOBAL=1: the right sum")


if __name__ == "__main__":
    main()
