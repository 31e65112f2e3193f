#!/usr/bin/env python3
"""Checks that a program's functions do not replace functions of the same name inside libgradwire.so.

Preloads a library of traps, each of which ends the process, with every name that libgradwire.so defines but
does not export, every name that Debian's libgloo.so exports (PyTorch's libtorch_cpu.so exports the same
names), and some names that programs often define. Then ranks communicate over TCP. A call of a trap ends its
process.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

# Names of the C++ runtime and of compilers, which the whole process shares.
SHARED_BY_ALL = re.compile(
    r"_ZN?K?St|_ZN?K?9__gnu_cxx|_ZT[ISV]N?K?St|_ZN10__cxxabi|_ZN?V?K?Sa|_ZN?K?S[abdios]|_ZT[CIST]+|_ZGV|_Zn|_Zd|__|_init$|_fini$|gw_"
)
COMMON = ["crc32", "adler32", "inflate", "deflate", "sgemm_", "cblas_sgemm", "mix", "name", "push", "pull"]


def names(library: pathlib.Path, *options: str) -> set:
    listing = subprocess.run(["nm", *options, library], check=True, capture_output=True, text=True).stdout
    found = (line.split() for line in listing.splitlines())
    return {parts[-1].split("@")[0] for parts in found if len(parts) >= 2 and parts[-2] not in "Uw"}


def main() -> int:
    library, program, compiler = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    traps = names(library, "--defined-only") | set(COMMON)
    gloo = next((p for p in map(pathlib.Path, ("/usr/lib/libgloo.so", "/usr/lib/x86_64-linux-gnu/libgloo.so"))
                 if p.exists()), None)
    if gloo is None:
        print("NOTE: no libgloo.so here, so its names are not among the traps")
    else:
        traps |= names(gloo, "-D", "--defined-only")
    linker = {"_DYNAMIC", "_GLOBAL_OFFSET_TABLE_", "_init", "_fini", "_edata", "_end"}
    traps = {t for t in traps - linker if re.fullmatch(r"[A-Za-z_]\w*", t) and not SHARED_BY_ALL.match(t)}
    with tempfile.TemporaryDirectory() as folder:
        source, trap = pathlib.Path(folder, "traps.s"), pathlib.Path(folder, "libtraps.so")
        lines = [f".globl {t}\n.type {t},@function\n{t}:" for t in sorted(traps)]
        # Writes the illegal instructions of x86 and ARM.
        source.write_text(".text\n" + "\n".join(lines) +
                          "\n#if defined(__x86_64__)\nud2\n#else\nudf #0\n#endif\n"
                          ".section .note.GNU-stack,\"\",%progbits\n")
        subprocess.run([compiler, "-shared", "-nostdlib", "-x", "assembler-with-cpp", source, "-o", trap],
                       check=True)
        run = [
            "env",
            f"LD_PRELOAD={trap}",
            program,
            "--gtest_filter=CApiAgreement.ArgumentsThatMayDifferAreAccepted/*:CApiAgreement.AStateThatOnlySomeRanksLoadIsRefused/*",
        ]
        result = subprocess.run(run, capture_output=True, text=True, timeout=120)
        passed = re.search(r"\[  PASSED  \] (\d+) tests", result.stdout)
        print(f"{len(traps)} traps; rc {result.returncode};"
              f" {passed.group(0) if passed else result.stdout[-500:]}")
        print(result.stderr[-2000:])
    return 0 if result.returncode == 0 and passed is not None and int(
        passed.group(1)) >= 4 and len(traps) > 100 else 1


if __name__ == "__main__":
    sys.exit(main())
