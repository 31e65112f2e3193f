#!/usr/bin/env python3
"""Checks the compiled CUDA kernels against docs/gpu.md; prints each one's registers, stack and shared memory.

    check_ptx.py ROOT [--nvcc nvcc] [--cache DIR] [--launched DIR --executable simt_tests] [--nm nm]

Compiles every .cu file of kernels/ and runtime/ to PTX, which ptxas assembles for sm_80 and sm_90. Fails when
a kernel spills registers or uses a stack, or when its 16-byte accesses to global memory are not those in the
table. With the logs of simt_tests (GRADWIRE_TEST_LOG), also fails when a test launched a kernel with more
threads or shared memory than a GPU allows for its compiled form. The user's cache folder stores results by
the contents of a source and its headers, so that all clones share them. CCACHE_DISABLE disables this cache.
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from check_kernel_table import (
    Launched,
    base_name,
    cuda_sources,
    instantiations,
    kernels_in_table,
    read_logs,
)  # noqa: E402

ARCHITECTURES = ("sm_80", "sm_90")
WIDE = {
    kind: re.compile(
        rf"^\s*(?:@\S+\s+)?{kind}\.(?:\w+\.)*?global(?:\.[\w:]+)*?\.(?:v4\.[bfus]32|v2\.[bfus]64)\b", re.M)
    for kind in ("ld", "st")
}
# A copy of 16 bytes to shared memory counts as a wide load.
ASYNC_COPY = re.compile(r"^\s*(?:@\S+\s+)?cp\.async\.\w+\.shared\.global\s.*,\s*16\s*;", re.M)
REGISTERS = 65536  # of a multiprocessor, and at most of a block
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
# Kernels that Gradwire launches only on devices with enough shared memory (fuses_attention()).
ASK_FIRST = {"attention_kernel", "attention_backward_kernel"}
ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(")


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True)


def wide_accesses(ptx: str) -> dict[str, list[str]]:
    """Returns a dictionary: mangled entry -> the operations (ld, st) that access 16 bytes at a time."""
    starts = [(m.group(1), m.end()) for m in ENTRY.finditer(ptx)]
    bodies = {name: ptx[begin:starts[i + 1][1] if i + 1 < len(starts) else len(ptx)]
              for i, (name, begin) in enumerate(starts)}
    return {
        name: [
            kind for kind, pattern in WIDE.items()
            if pattern.search(body) or (kind == "ld" and ASYNC_COPY.search(body))
        ]
        for name, body in bodies.items()
    }


def thread_limits(ptx: str) -> dict[str, int]:
    """Returns a dictionary: mangled entry -> number of threads that its __launch_bounds__ allow."""
    found = {}
    for match in re.finditer(
            r"\.entry\s+(\w+)\s*\([^{]*?\)\s*(?:\.minnctapersm\s+\d+\s*)?\.maxntid\s+([\d, ]+)", ptx):
        sizes = [int(size) for size in match.group(2).split(",")]
        found[match.group(1)] = sizes[0] * sizes[1] * sizes[2] if len(sizes) == 3 else sizes[0]
    return found


def resources(text: str) -> dict[str, dict[str, int]]:
    """Returns a dictionary: mangled entry -> the numbers of `ptxas -v`."""
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in text.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match.group(1)
            found[name] = {}
        elif match := re.search(r"Function properties for (\w+)", line):
            name = match.group(1)
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
                                line):
            if name in found:
                found[name].update(stack=int(match.group(1)),
                                   spills=int(match.group(2)) + int(match.group(3)))
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[name].update(registers=int(match.group(1)), shared=int(shared.group(1)) if shared else 0)
    return found


def digest(*parts: bytes) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(hashlib.sha256(part).digest())
    return state.hexdigest()


class Cache:
    """Stores results by the contents of a source and its headers."""
    DAYS_KEPT = 30

    def __init__(self, folder: pathlib.Path, root: pathlib.Path, compiler: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.root = folder, root
        self.tools = compiler.encode() + pathlib.Path(__file__).read_bytes()

    def _includes_file(self, source: pathlib.Path) -> pathlib.Path:
        name = str(source.relative_to(self.root)).encode()
        return self.folder / (digest(self.tools, name, source.read_bytes()) + ".includes")

    def _result_file(self, includes_file: pathlib.Path, includes: list[str]) -> pathlib.Path:
        contents = [name.encode() + (self.root / name).read_bytes() for name in includes]
        return self.folder / (digest(includes_file.name.encode(), *contents) + ".json")

    def find(self, source: pathlib.Path) -> dict | None:
        includes_file = self._includes_file(source)
        try:
            kept = self._result_file(includes_file, json.loads(includes_file.read_text()))
            result = json.loads(kept.read_text())
        except FileNotFoundError:
            return None
        os.utime(includes_file)
        os.utime(kept)
        return result

    def keep(self, source: pathlib.Path, includes: list[str], result: dict) -> None:
        includes_file = self._includes_file(source)
        self._write(self._result_file(includes_file, includes), result)
        self._write(includes_file, includes)

    def _write(self, path: pathlib.Path, content: object) -> None:
        """Writes a file in one step, because another clone's test may read it."""
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(content))
        part.rename(path)

    def expire(self) -> None:
        for path in self.folder.iterdir():
            if time.time() - path.stat().st_mtime > self.DAYS_KEPT * 86400:
                path.unlink(missing_ok=True)


def compile_kernels(source: pathlib.Path, root: pathlib.Path, nvcc: str) -> tuple[dict, list[str]]:
    """Returns the properties of a source's kernels, and the files of the repository that it includes."""
    with tempfile.TemporaryDirectory(prefix="gradwire-ptx-") as folder:
        ptx, includes = pathlib.Path(folder, "kernels.ptx"), pathlib.Path(folder, "includes")
        made = run([
            nvcc, "-ptx", "-arch=compute_80", "-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{root}",
            f"-I{root}/include",
            str(source), "-MD", "-MF",
            str(includes), "-o",
            str(ptx)
        ])
        if made.returncode != 0:
            raise SystemExit(f"{source}: nvcc failed\n{made.stderr}")
        result = {
            "wide": wide_accesses(ptx.read_text()), "limits": thread_limits(ptx.read_text()), "resources": {}
        }
        ptxas = str(pathlib.Path(nvcc).with_name("ptxas")) if "/" in nvcc else "ptxas"
        for architecture in ARCHITECTURES:
            done = run([ptxas, "-v", f"-arch={architecture}", str(ptx), "-o", str(ptx.with_suffix(".cubin"))])
            if done.returncode != 0:
                raise SystemExit(f"{source}: ptxas failed\n{done.stderr}")
            result["resources"][architecture] = resources(done.stdout + done.stderr)
        names = includes.read_text().partition(":")[2].replace("\\\n", " ").split()
    ours = {pathlib.Path(os.path.abspath(name)) for name in names}
    return result, sorted(
        str(path.relative_to(root)) for path in ours if path.is_relative_to(root) and path != source)


def examine(source: pathlib.Path, root: pathlib.Path, nvcc: str, cache: Cache) -> dict:
    result = cache.find(source)
    if result is None:
        result, includes = compile_kernels(source, root, nvcc)
        cache.keep(source, includes, result)
    return result


def demangle(names: list[str]) -> dict[str, str]:
    if not names:
        return {}
    lines = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True,
                           check=True).stdout
    return dict(zip(names, lines.splitlines()))


def errors_of(full: str, architecture: str, use: dict[str, int], used: Launched) -> list[str]:
    """Returns the errors of a kernel's resources, including errors for its largest launch in a test."""
    where, wrong = f"{full} on {architecture}", []
    if use["spills"] or use["stack"]:
        wrong.append(f"{where}: {use['stack']} bytes of stack, {use['spills']} of spills")
    if used.threads * use["registers"] > REGISTERS:
        wrong.append(f"{where}: {used.threads} threads of {use['registers']} registers do not fit; give it "
                     f"__launch_bounds__({used.threads})")
    most = max(SHARED.values()) if base_name(full) in ASK_FIRST else SHARED[architecture]
    if used.threads and used.shared + use["shared"] > most:
        wrong.append(f"{where}: {used.shared + use['shared']} bytes of shared memory; a block has at most "
                     f"{most}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--nm", default="nm")
    parser.add_argument(
        "--cache", type=pathlib.Path,
        default=pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "gradwire", "ptx").expanduser())
    parser.add_argument("--launched", type=pathlib.Path)
    parser.add_argument("--executable")
    options = parser.parse_args()
    root = options.root.resolve()
    table = kernels_in_table(root)
    launched = {}
    if options.launched:
        logs = read_logs(options.launched)
        launched = {name: logs[address] for address, name in
                    instantiations(options.executable, options.nm, set(table)).items() if address in logs}

    # CCACHE_DISABLE, which measurements of a cold build set, disables the cache.
    with tempfile.TemporaryDirectory(prefix="gradwire-ptx-") as empty:
        folder = pathlib.Path(empty) if os.environ.get("CCACHE_DISABLE") else options.cache
        cache = Cache(folder, root, run([options.nvcc, "--version"]).stdout)
        with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
            results = list(
                pool.map(lambda source: examine(source, root, options.nvcc, cache), cuda_sources(root)))
        cache.expire()

    wrong, wide_of = [], {}
    print(f"{'kernel':40} {'16-byte':7} " + " ".join(f"{a + ' registers/stack/shared':>29}"
                                                     for a in ARCHITECTURES))
    for result in results:
        for mangled, full in sorted(demangle(list(result["wide"])).items()):
            name, wide = base_name(full), result["wide"][mangled]
            wide_of.setdefault(name, set()).update(wide)
            used, limit = launched.get(full, Launched()), result["limits"].get(mangled, 1024)
            if used.threads > limit:
                wrong.append(
                    f"{full} was launched with {used.threads} threads; its __launch_bounds__ allow {limit}")
            uses = [result["resources"][architecture][mangled] for architecture in ARCHITECTURES]
            for architecture, use in zip(ARCHITECTURES, uses):
                wrong += errors_of(full, architecture, use, used)
            print(f"{name:40} {'+'.join(wide) or '-':7} " + " ".join(
                f"{'{registers}/{stack}/{shared}'.format(**use):>29}" for use in uses))
    for name, row in table.items():
        says = row.wide.split()[0]
        expected = set() if says == "-" else set(says.split("+"))
        if name in wide_of and wide_of[name] != expected:
            wrong.append(f"docs/gpu.md says {name} makes 16-byte accesses: {says}; its PTX: "
                         f"{'+'.join(sorted(wide_of[name])) or '-'}")
    print("\n".join(wrong)
          or f"{len(wide_of)} kernels: no spills, no stack, 16-byte accesses as the table says")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
