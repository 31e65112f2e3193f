#!/usr/bin/env python3
"""libgradwire.so exports the functions that gradwire.h declares, all of them, and nothing else."""
import pathlib
import re
import subprocess
import sys


def main() -> int:
    library, header = map(pathlib.Path, sys.argv[1:3])
    listing = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    exported = {line.split()[-1].split("@")[0] for line in listing.splitlines()}
    declared = set(re.findall(r"GW_API [^;(]*?\b(gw_\w+)\(", header.read_text()))
    for name in sorted(exported - declared):
        print(f"exported, but not declared in {header.name}: {name}")
    for name in sorted(declared - exported):
        print(f"declared in {header.name}, but not exported: {name}")
    print(f"{len(exported)} symbols exported, {len(declared)} declared")
    dynamic = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    soname = re.search(r"SONAME.*\[(.*)\]", dynamic)
    print(f"soname {soname.group(1) if soname else 'missing'}")
    versioned = soname is not None and re.fullmatch(r"libgradwire\.so\.\d+", soname.group(1)) is not None
    return 0 if exported == declared and len(declared) > 10 and versioned else 1


if __name__ == "__main__":
    sys.exit(main())
