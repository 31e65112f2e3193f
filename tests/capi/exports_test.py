#!/usr/bin/env python3
"""Checks that libgradwire.so exports exactly the functions that gradwire.h declares, and that the library
needs no library of which a program could load a second copy.

The loader binds an undefined name of a library to the first definition of that name. libtorch_cpu.so exports
the names of its Gloo, so a libgradwire.so that needed Gloo would run PyTorch's Gloo. Allowed libraries are the
C and C++ runtimes, which a process loads once, and NVIDIA's versioned libraries.
"""
import pathlib
import re
import subprocess
import sys

RUNTIMES = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux[-\w]*|libcudart|libcublas|libcublasLt|"
    r"libasan|libubsan|libtsan)\.so\.\d+")


def symbols(library: pathlib.Path, *options: str) -> list:
    listing = subprocess.run(["nm", "-D", *options, library], check=True, capture_output=True,
                             text=True).stdout
    return [line.split()[-2:] for line in listing.splitlines()]


def main() -> int:
    library, header = map(pathlib.Path, sys.argv[1:3])
    failures = []
    exported = {name.split("@")[0] for _, name in symbols(library, "--defined-only")}
    declared = set(re.findall(r"GW_API [^;(]*?\b(gw_\w+)\(", header.read_text()))
    failures += [
        f"exported, but not declared in {header.name}: {name}" for name in sorted(exported - declared)]
    failures += [
        f"declared in {header.name}, but not exported: {name}" for name in sorted(declared - exported)]
    print(f"{len(exported)} symbols exported, {len(declared)} declared")
    if len(declared) <= 10:
        failures.append(f"only {len(declared)} functions found in {header.name}")

    dynamic = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    soname = re.search(r"SONAME.*\[(.*)\]", dynamic)
    print(f"soname {soname.group(1) if soname else 'missing'}")
    major, minor = re.findall(r"#define GW_VERSION_M\w+ (\d+)", header.read_text())
    expected = f"libgradwire.so.{major if int(major) else f'0.{minor}'}"
    if soname is None or soname.group(1) != expected:
        failures.append(f"the soname is not {expected}")
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    print(f"needs {' '.join(needed)}")
    failures += [f"needs {name}, of which a program may hold another copy" for name in needed
                 if not RUNTIMES.fullmatch(name)]

    # The loader must find names of kind "U". Names of kind "w", such as __gmon_start__, may be missing. Any
    # library could define a name without a version.
    taken = [name for kind, name in symbols(library, "--undefined-only") if kind == "U"]
    print(f"takes {len(taken)} symbols from them")
    if "-fsanitize" not in sys.argv:
        failures += [f"takes a symbol that anybody may define: {name}" for name in taken if "@" not in name]
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
