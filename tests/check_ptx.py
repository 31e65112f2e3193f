#!/usr/bin/env python3
"""Checks the compiled CUDA kernels against docs/gpu.md; prints each one's registers, stack and shared memory.

    check_ptx.py ROOT [--nvcc nvcc] [--cache DIR] [--launched DIR --executable simt_tests] [--nm nm]

For every .cu file of kernels/ and runtime/: one PTX file, assembled by ptxas for sm_80 and sm_90. Fails when
a kernel spills registers or uses a stack, when its PTX lacks the 16-byte accesses to global memory that the
table promises, or has them unannounced. With the logs that simt_tests wrote (GRADWIRE_SIMT_LOG), also fails
when a test launched a kernel with more threads or shared memory than its compiled form can have on a GPU.
Results are cached as long as the sources stay the same.
"""
import argparse
import concurrent.futures
import hashlib
import json
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from check_kernel_table import base_name, cuda_sources, instantiations, kernels_in_table, read_logs  # noqa: E402

ARCHITECTURES = ("sm_80", "sm_90")
WIDE = {kind: re.compile(rf"^\s*(?:@\S+\s+)?{kind}\.(?:\w+\.)*?global(?:\.[\w:]+)*?\.(?:v4\.[bfus]32|v2\.[bfus]64)\b", re.M)
        for kind in ("ld", "st")}
REGISTERS = 65536  # of a multiprocessor, and the most a block can have
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(")


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True)


def wide_accesses(ptx: str) -> dict[str, list[str]]:
    """Mangled entry -> which of ld and st access 16 bytes at a time."""
    starts = [(m.group(1), m.end()) for m in ENTRY.finditer(ptx)]
    bodies = {name: ptx[begin:starts[i + 1][1] if i + 1 < len(starts) else len(ptx)]
              for i, (name, begin) in enumerate(starts)}
    return {name: [kind for kind, pattern in WIDE.items() if pattern.search(body)] for name, body in bodies.items()}


def thread_limits(ptx: str) -> dict[str, int]:
    """Mangled entry -> threads that its __launch_bounds__ allow."""
    found = {}
    for match in re.finditer(r"\.entry\s+(\w+)\s*\([^{]*?\)\s*(?:\.minnctapersm\s+\d+\s*)?\.maxntid\s+([\d, ]+)", ptx):
        sizes = [int(size) for size in match.group(2).split(",")]
        found[match.group(1)] = sizes[0] * sizes[1] * sizes[2] if len(sizes) == 3 else sizes[0]
    return found


def resources(text: str) -> dict[str, dict[str, int]]:
    """Mangled entry -> numbers from `ptxas -v`."""
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match.group(1)
            found[name] = {}
        elif match := re.search(r"Function properties for (\w+)", line):
            name = match.group(1)
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if name in found:
                found[name].update(stack=int(match.group(1)), spills=int(match.group(2)) + int(match.group(3)))
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[name].update(registers=int(match.group(1)), shared=int(shared.group(1)) if shared else 0)
    return found


def examine(source: pathlib.Path, root: pathlib.Path, nvcc: str, cache: pathlib.Path, stamp: str) -> dict:
    kept = cache / (source.name + ".json")
    if kept.exists():
        result = json.loads(kept.read_text())
        if result["stamp"] == stamp:
            return result
    ptx = cache / (source.name + ".ptx")
    made = run([nvcc, "-ptx", "-arch=compute_80", "-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{root}", str(source),
                "-o", str(ptx)])
    if made.returncode != 0:
        raise SystemExit(f"{source}: nvcc failed\n{made.stderr}")
    result = {"stamp": stamp, "wide": wide_accesses(ptx.read_text()), "limits": thread_limits(ptx.read_text()), "resources": {}}
    ptxas = str(pathlib.Path(nvcc).with_name("ptxas")) if "/" in nvcc else "ptxas"
    for architecture in ARCHITECTURES:
        done = run([ptxas, "-v", f"-arch={architecture}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))])
        if done.returncode != 0:
            raise SystemExit(f"{source}: ptxas failed\n{done.stderr}")
        result["resources"][architecture] = resources(done.stdout + done.stderr)
    kept.write_text(json.dumps(result))
    return result


def demangle(names: list[str]) -> dict[str, str]:
    if not names:
        return {}
    lines = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return dict(zip(names, lines.splitlines()))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--nm", default="nm")
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("build/ptx"))
    parser.add_argument("--launched", type=pathlib.Path)
    parser.add_argument("--executable")
    options = parser.parse_args()
    root = options.root.resolve()
    table = kernels_in_table(root)
    options.cache.mkdir(parents=True, exist_ok=True)
    launched = {}
    if options.launched:
        logs = read_logs(options.launched)
        launched = {name: logs[address] for address, name in
                    instantiations(options.executable, options.nm, set(table)).items() if address in logs}

    stamp = hashlib.sha256(run([options.nvcc, "--version"]).stdout.encode() + pathlib.Path(__file__).read_bytes())
    for header in sorted(p for top in ("kernels", "runtime") for p in (root / top).rglob("*") if p.suffix in (".h", ".cuh")):
        stamp.update(header.read_bytes())
    sources = cuda_sources(root)
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        results = list(pool.map(lambda s: examine(s, root, options.nvcc, options.cache, hashlib.sha256(
            stamp.digest() + s.read_bytes()).hexdigest()), sources))

    wrong, wide_of = [], {}
    print(f"{'kernel':40} {'16-byte':7} " + " ".join(f"{a + ' registers/stack/shared':>29}" for a in ARCHITECTURES))
    for result in results:
        for mangled, full in sorted(demangle(list(result["wide"])).items()):
            name, wide = base_name(full), result["wide"][mangled]
            wide_of.setdefault(name, set()).update(wide)
            used = launched.get(full)
            limit = result["limits"].get(mangled, 1024)
            if used and used.threads > limit:
                wrong.append(f"{full} was launched with {used.threads} threads; its __launch_bounds__ allow {limit}")
            cells = []
            for architecture in ARCHITECTURES:
                use = result["resources"][architecture][mangled]
                cells.append(f"{use['registers']}/{use['stack']}/{use['shared']}")
                if use["spills"] or use["stack"]:
                    wrong.append(f"{full} on {architecture}: {use['stack']} bytes of stack, {use['spills']} of spills")
                if used and used.threads * use["registers"] > REGISTERS:
                    wrong.append(f"{full} on {architecture}: {used.threads} threads of {use['registers']} registers do "
                                 f"not fit; give it __launch_bounds__({used.threads})")
                if used and used.shared + use["shared"] > SHARED[architecture]:
                    wrong.append(f"{full} on {architecture}: {used.shared + use['shared']} bytes of shared memory; there "
                                 f"are {SHARED[architecture]}")
            print(f"{name:40} {'+'.join(wide) or '-':7} " + " ".join(f"{c:>29}" for c in cells))
    for name, row in table.items():
        says = row.wide.split()[0]
        expected = set() if says == "-" else set(says.split("+"))
        if name in wide_of and wide_of[name] != expected:
            wrong.append(f"docs/gpu.md says {name} makes 16-byte accesses: {says}; its PTX: "
                         f"{'+'.join(sorted(wide_of[name])) or '-'}")
    print("\n".join(wrong) or f"{len(wide_of)} kernels: no spills, no stack, 16-byte accesses as the table says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
