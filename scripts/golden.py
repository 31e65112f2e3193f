#!/usr/bin/env python3
"""Stores hashes of what Gradwire computes and prints, and compares them after a change that must keep all bits.

    golden.py store FILE [--detail]    writes KEY<TAB>HASH for each value; the baseline: tests/golden/golden.tsv
    golden.py compare FILE             prints changed, renamed, new and missing keys; exit code 1 if there are any
    golden.py --smoke                  tests this script with a part of the values, in seconds

--only takes parts, separated by commas:
    results    means, saved states and collectives of every spec, schedule and world, through the C ABI
    train      checkpoints and run logs
    help       --help of every command
    kernels    PTX and SASS; needs nvcc, cuobjdump and nvdisasm (scripts/cuda_pip.sh disassembler)
    bench      rows of every command of gradwire-bench, without measured numbers

A key stands for several worlds, files or template instantiations. With --detail each has a line of its own.
Values of a part depend on the processor, the system or nvcc, which FILE names first. `compare` skips a part
for which they differ. Values must not depend on --threads.
"""
import argparse
import collections
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools/checks"), str(ROOT / "tests/cli")]
from check_kernel_table import base_name  # noqa: E402
from command import CommandTest  # noqa: E402
from machine_code import demangle  # noqa: E402

# The parts, and the headers that must be equal for a comparison.
PARTS = {"results": ("processor", "system"), "train": ("processor", "system"), "help": ("system", ),
         "kernels": ("nvcc", ), "bench": ("system", )}
# Instructions that the host's kernels and OpenBLAS choose by.
INSTRUCTIONS = set("avx2 fma bmi2 avx512f avx512bw avx512vl avx512dq avx512cd avx512_bf16 avx512_fp16 amx_bf16"
                   .split())
# Fields of records, checkpoints and rows that differ from run to run.
MASKED = re.compile(r"(\w+_)?(ms|us|seconds|tflops|gbps|noise|per_s)|waited_s|shares|data_wait_share|stopped|n"
                    r"|rounds|id|crc32")

MODEL = ("--data synthetic:250 --device host --batch-size 9 --width 27 --depth 2 --heads 3 --mlp 43 --steps 7"
         " --eval-every 0.5 --checkpoint-every 4")
RUNS = {
    "fp32": "--ranks 1",
    "sgd": "--ranks 2 --compression int8:round=stochastic --optimizer sgd --momentum 0.9 --precision bf16",
    "powersgd": "--ranks 4 --ranks-per-node 2 --compression powersgd:rank=2,schedule=hierarchical",
    "resumed": "--ranks 3 --compression powersgd:rank=2 --resume powersgd/step-000000004",
    "alternate": "--ranks 3 --compression powersgd:rank=3,alternate=on,residual=int8 --accumulate 2",
    "muon": "--ranks 2 --compression int4:rotate=hadamard --optimizer muon",
    "dion": "--ranks 3 --compression fp8 --optimizer dion:rank=8 --precision bf16",
    "shard-adamw": "--ranks 4 --compression int8 --shard optimizer --gather-weights bf16",
    "shard-sgd": "--ranks 3 --compression bf16 --shard optimizer --optimizer sgd --precision bf16",
    "topk": "--ranks 3 --compression topk:k=5,of=256,ef_decay=0.9 --augment flip,crop --graph",
    "randk": "--ranks 4 --compression randk:ratio=0.1,schedule=ring --overlap-forward --bucket-mb 0.01",
    "ef21": "--ranks 2 --compression sign:ef=ef21 --gelu tanh --optimizer sgd",
}
BENCHES = {
    "collectives": "--device host --ranks 3 -b 64K -e 64K -n 1 -w 0 --no-baseline",
    "formats": "--size 64K --stop 0.1ms --rows 1 --elements 4096 --draws 2",
    "hook": "--model vit_tiny --device host --stop 1",
    "kernels": "--device host --max-size 64K --stop 0.1ms --cache warm",
    "compare": "kernels.json kernels.json",
    "numerics": "--ranks 2,3 --elements 1000",
    "orthonormalize": "--model vit_tiny --rank 1 --device host --stop 1",
    "schedules": "--ranks 2,3,4,8 --per-node 2",
    "step": "--device host --batch-size 1 --stop 10ms",
}


def digest(*parts):
    return hashlib.sha256(b"".join(p if isinstance(p, bytes) else p.encode() for p in parts)).hexdigest()[:16]


def masked(value, floats=True):
    """Sets the fields in MASKED to 0 in a JSON value and, without `floats`, also all numbers with fractions."""
    if isinstance(value, dict):
        return {k: 0 if MASKED.fullmatch(k) else masked(v, floats) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(v, floats) for v in value]
    return 0 if isinstance(value, float) and not floats else value


class Golden:
    """Computes the hashes of each part with the programs of a build. `few`: a part of them."""

    def __init__(self, options, folder, few):
        self.build, self.folder, self.few = options.build.resolve(), folder, few
        self.environment = CommandTest.environment({"GRADWIRE_THREADS": str(options.threads),
                                                    "GRADWIRE_BENCH_FLUSH_BYTES": str(1 << 20)})
        self.environment["PATH"] = ":".join(
            [f"{self.build}/bin", self.environment["PATH"], f"{self.build}/disassembler/bin"])

    def run(self, *words):
        done = subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True,
                              check=False)
        if done.returncode != 0:
            sys.exit(f"golden.py: {words}: exit code {done.returncode}\n{done.stdout[-999:]}{done.stderr}")
        return done.stdout

    def selected(self, table):
        return list(table.items())[:2 if self.few else None]

    def results(self):
        read_end, write_end = os.pipe()
        words = ["golden_results", f"/dev/fd/{write_end}", *["--few"] * self.few]
        process = subprocess.Popen(words, pass_fds=[write_end], env=self.environment)
        os.close(write_end)
        with open(read_end, "rb") as values:
            while line := values.readline():
                key, size = line.decode().rsplit("\t", 1)
                yield key, digest(values.read(int(size)))
        if process.wait() != 0:
            sys.exit("golden.py: golden_results failed")

    def train(self):
        for name, flags in self.selected(RUNS):
            log = self.folder / f"{name}.jsonl"  # the checkpoint's path is in the log, so it is relative
            self.run("gradwire", "train", *MODEL.split(), *flags.split(), "--checkpoint", name, "--log", log)
            for path in sorted(self.folder.glob(f"{name}/*/*.safetensors")):
                data = path.read_bytes()
                end = 8 + int.from_bytes(data[:8], "little")
                header = json.loads(data[8:end])
                text = header["__metadata__"]
                text["gradwire"] = masked(json.loads(text["gradwire"]))
                key = f"checkpoint {name}@{path.relative_to(self.folder)}"
                yield key, digest(json.dumps(masked(header)), data[end:])
            records = [masked(json.loads(line)) for line in log.read_text().splitlines()]
            # The number of records of waiting times depends on the time of the run.
            yield f"log {name}", digest(json.dumps([r for r in records if r["type"] != "waits"]))

    def help(self):
        def commands(*words):
            text = self.run(*words, "--help")
            yield " ".join(words), digest(text)
            listed = text.partition("\nCommands:\n")[2].partition("\n\n")[0]
            for command in re.findall(r"^  (\w\S*)", listed, re.M):
                yield from commands(*words, command)
        yield from commands("gradwire")
        yield from commands("gradwire-bench")

    def bench(self):
        for command, flags in self.selected(BENCHES):
            out = self.folder / f"{command}.json"
            self.run("gradwire-bench", command, *flags.split(), "--json", out)
            rows = json.loads(re.sub(r"host, \d+ threads?", "host", out.read_text()))
            kept = [row["row"] for row in rows] if command == "compare" else masked(rows, floats=False)
            yield command, digest(json.dumps(kept))
        for words in ("kernels --list", "formats --list", "schedules --check --max-ranks 6"):
            yield words, digest(self.run("gradwire-bench", *words.split()))

    def kernels(self):
        if not all(shutil.which(name, path=self.environment["PATH"]) for name in ("cuobjdump", "nvdisasm")):
            print("golden.py: kernels are left out: cuobjdump and nvdisasm are not on PATH", file=sys.stderr)
            return
        # The program has all kernels; the folder may have objects of sources that no longer exist.
        path = next(self.build.rglob("*.cu.o"), None) if self.few else self.build / "bin/gradwire-bench"
        if not path:
            return
        found = [*machine_code(self.run("cuobjdump", "-sass", path)),
                 *ptx_code(self.run("cuobjdump", "-ptx", path))]
        names = demangle([name for _, name, _ in found])
        for kind, name, text in found:
            # Names of symbols contain the name of the file.
            text = re.sub(r"_Z\w+", "SYMBOL", re.sub(rf"\b{name}(?=\b|_param_)", "KERNEL", text))
            yield f"{kind} {base_name(names[name])}@{names[name]}", digest(text)

    def headers(self):
        """Returns what the values depend on."""
        cpu = pathlib.Path("/proc/cpuinfo").read_text()
        cpu = dict(re.findall(r"^(vendor_id|flags)\s*: (.*)$", cpu, re.M))
        system = platform.freedesktop_os_release()
        versions = {language: re.search(r'COMPILER_VERSION "(.*)"', path.read_text()).group(1)
                    for language in ("CXX", "CUDA")
                    for path in self.build.glob(f"CMakeFiles/*/CMake{language}Compiler.cmake")}
        return {"processor": " ".join([cpu["vendor_id"], *sorted(INSTRUCTIONS & set(cpu["flags"].split()))]),
                "system": f"{system['ID']} {system.get('VERSION_ID')}, C++ compiler {versions['CXX']}",
                "nvcc": versions.get("CUDA", "none")}


def machine_code(text):
    """Yields (kind, mangled name, encoding) of every function in the output of cuobjdump -sass."""
    architecture = ""
    for block in re.split(r"^(?=\tcode for |\t\tFunction : )", text, flags=re.M):
        if match := re.match(r"\tcode for (\w+)", block):
            architecture = match.group(1)
        elif match := re.match(r"\t\tFunction : (\S+)", block):
            yield f"SASS {architecture}", match.group(1), " ".join(re.findall(r"/\* (0x\w+) \*/", block))


def ptx_code(text):
    """Yields (kind, mangled name, text) of every function in the output of cuobjdump -ptx."""
    target, lines = "", iter(text.splitlines())
    for line in lines:
        if line.startswith(".target"):
            target = line.split()[1]
        if not (match := re.match(r"(?:\.\w+ )*\.(?:entry|func)\b.*?(\w+)\($", line)):
            continue
        body, depth = [line], 0
        while depth > 0 or not body[-1].endswith(("}", ";")):
            body.append(next(lines))
            depth += body[-1].count("{") - body[-1].count("}")
        # Labels contain the position of the function in its file.
        yield f"PTX {target}", match.group(1), re.sub(r"\$L__BB\d+_", "$L_", "\n".join(body))


def gather(golden, parts, detail):
    """Returns a dictionary: key -> hash. Without `detail`, keys that differ only after the "@" share a hash."""
    groups = collections.defaultdict(list)
    for part in parts:
        for key, value in getattr(golden, part)():
            groups[f"{part}/" + (key if detail else key.partition("@")[0])].append(value)
    return {key: digest(" ".join(sorted(values))) for key, values in groups.items()}


def write(path, headers, values):
    lines = [f"# {k}\t{v}\n" for k, v in headers.items()] + sorted(f"{k}\t{v}\n" for k, v in values.items())
    path.write_text("".join(lines))


def read(path):
    """Returns the headers and the values of a file."""
    lines = [line.rsplit("\t", 1) for line in path.read_text().splitlines()]
    return {k[2:]: v for k, v in lines if k[0] == "#"}, {k: v for k, v in lines if k[0] != "#"}


def comparable(stored, here, parts):
    """Returns the parts whose headers are equal. Prints why the others are skipped."""
    equal = [part for part in parts if all(stored.get(k) == here[k] for k in PARTS[part])]
    for key in here if equal != list(parts) else ():
        print(f"golden.py: {key}: {stored.get(key, 'missing')} in the file, {here[key]} here")
    print("golden.py: comparing", ", ".join(equal) or "nothing")
    return equal


def compare(stored, values):
    """Prints the differences and returns their number."""
    new = {key: value for key, value in values.items() if key not in stored}
    lines = [f"changed  {key}" for key in values if stored.get(key, values[key]) != values[key]]
    for key in sorted(stored.keys() - values.keys()):
        renamed = next((name for name, value in new.items() if value == stored[key]), None)
        new.pop(renamed, None)
        lines.append(f"renamed  {key} -> {renamed}" if renamed else f"gone     {key}")
    print("\n".join(lines + [f"new      {key}" for key in new] + [f"{len(values)} values"]))
    return len(lines) + len(new)


def smoke(options, folder):
    """Compares a part of the values with themselves, and then with a file that has four differences."""
    golden, path = Golden(options, folder, few=True), folder / "golden.tsv"
    values = gather(golden, options.only, detail=False)
    write(path, golden.headers(), values)
    headers, stored = read(path)
    same_headers = comparable(headers, golden.headers(), options.only) == options.only
    if not same_headers or compare(stored, values) != 0:
        sys.exit("golden.py: the values differ from themselves")
    changed, renamed, new, *_ = sorted(values)
    wrong = {**values, changed: "another hash", "help/renamed": values[renamed], "help/gone": "any hash"}
    del wrong[renamed], wrong[new]
    if compare(wrong, values) != 4:
        sys.exit("golden.py: a changed, a renamed, a missing and a new key are not 4 differences")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("store", "compare"), nargs="?")
    parser.add_argument("file", type=pathlib.Path, nargs="?")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--detail", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not set(options.only) <= set(PARTS) or (options.file is None) != options.smoke:
        parser.error(f"expected store FILE, compare FILE or --smoke, with parts of {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="gradwire-golden-") as name:
        if options.smoke:
            smoke(options, pathlib.Path(name))
            return
        golden = Golden(options, pathlib.Path(name), few=False)
        headers = {**golden.headers(), "detail": "yes" if options.detail else "no"}
        if options.action == "store":
            write(options.file, headers, gather(golden, options.only, options.detail))
            return
        was, stored = read(options.file)
        parts = comparable(was, golden.headers(), options.only)
        stored = {key: value for key, value in stored.items() if key.partition("/")[0] in parts}
        sys.exit(1 if compare(stored, gather(golden, parts, was.get("detail") == "yes")) else 0)


if __name__ == "__main__":
    main()
