#!/usr/bin/env python3
"""Checks the machine code of every compiled CUDA kernel against the budgets in kernel_budgets.tsv.

    check_machine_code.py ROOT BUILD [--write] [--all] [--launched DIR --executable simt_tests] [--nm nm]

Reads the objects in BUILD with cuobjdump, for every architecture in them. Fails when
- a kernel uses local memory,
- on sm_90, a kernel does not begin with the wait for earlier kernels (wait_for_earlier_kernels() in launch.cuh),
- its 16-byte accesses to global memory are not those in the table of docs/gpu.md,
- with the logs of simt_tests (GRADWIRE_TEST_LOG), a test launched it with more threads or shared memory than
  a GPU allows for its compiled form,
- nvcc may contract products and additions in a kernel of a wire format,
- on sm_90, a kernel has more registers, fewer bytes in flight or more instructions per byte than its row in
  kernel_budgets.tsv allows,
- on sm_90, its hot loop calls a subroutine, has half-filled sectors, or lacks 16-byte accesses, and the
  row does not allow that, or it stores vectors word by word,
- a row is outside the limits for all kernels without a reason, or
- the table in docs/results/machine-code.md, which explains the figures, is out of date: its words differ, or
  its figures by more than nvcc's choice of registers explains. --write updates it.

--all prints every instantiation. Without cuobjdump and nvdisasm, which scripts/cuda_pip.sh installs, the exit
status is 77: skipped. BUILD has a cache of the results.
"""
import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import gate  # noqa: E402
import machine_code  # noqa: E402
from check_kernel_table import (  # noqa: E402
    ROW, Launched, add_launched, base_name, kernels_in_table, launched_by_name)

SKIPPED = 77
PINNED = "sm_90"
REGISTERS, THREADS, BLOCKS, SHARED = 65536, 2048, 32, 228 * 1024  # of an sm_90 multiprocessor
MOST_SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}  # of a block
# Kernels that Gradwire launches only on devices with enough shared memory (fuses_attention()).
ASK_FIRST = {"attention_kernel", "attention_backward_kernel"}
SHARED_PER_BLOCK = 1024  # bytes that the driver uses
KB_NEEDED = 32           # loads in flight on a multiprocessor for full bandwidth (Little's law)
INSTRUCTIONS_PER_BYTE = 7.8  # what an H200 can issue while it copies; an H100: 11
BEST = 92                # % of copy bandwidth of the best kernels
GENERATED = ("<!-- machine code: written by make machine-code -->", "<!-- end of machine code -->")


@dataclasses.dataclass
class Budget:
    threads: int            # of a block
    dynamic_shared_kb: float  # largest of a block
    registers: int
    kb_in_flight: float
    instructions_per_byte: float
    allowed: set[str]
    reason: str


def read_budgets(path: pathlib.Path) -> dict[str, Budget]:
    budgets: dict[str, Budget] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        cells = line.split("\t")
        if len(cells) not in (7, 8):
            raise SystemExit(
                f"{path}:{number}: {len(cells)} columns, expected kernel, threads, dynamic shared KB, "
                "registers, KB in flight, instructions per byte, allowed, reason, separated by tabs")
        allowed = {word for word in cells[6].split(",") if word != "-"}
        if unknown := allowed - {"call", "half-sector", "narrow"}:
            raise SystemExit(
                f"{path}:{number}: {', '.join(unknown)} cannot be allowed; call, half-sector and narrow can")
        if cells[0] in budgets:
            raise SystemExit(f"{path}:{number}: {cells[0]} is listed twice")
        budgets[cells[0]] = Budget(int(cells[1]), float(cells[2]), int(cells[3]), float(cells[4]),
                                   float(cells[5]), allowed, cells[7].strip() if len(cells) == 8 else "")
    return budgets


def label(full: str) -> str:
    """Returns the kernel's name, with the op for kernels of kernels/cuda/vector.cuh that run several."""
    name = base_name(full)
    op = re.search(r"(?:namespace\)|gradwire)::(\w+)[<(,> ]", full.partition("<")[2])
    several = ("for_columns_kernel", "column_partials_kernel", "elements_kernel")
    return f"{name}({op[1]})" if op and name in several else name


def warps(function: dict, threads: int, dynamic_shared: float) -> int:
    """Returns the number of warps that are resident on a multiprocessor."""
    block_warps = (threads + 31) // 32
    by_registers = REGISTERS // ((function["REG"] * 32 + 255) // 256 * 256) // block_warps
    by_shared = int(SHARED // (function["SHARED"] + dynamic_shared + SHARED_PER_BLOCK))
    return min(by_registers, by_shared, BLOCKS, THREADS // 32 // block_warps) * block_warps


@dataclasses.dataclass
class Figures:
    """The figures of one instantiation, or the worst of all instantiations with 16-byte accesses."""
    registers: int = 0
    warps: int = 64
    kb_in_flight: float = 1e9
    kb_needed: float = 0.0  # KB_NEEDED times the reads' share of the traffic
    instructions_per_byte: float = 0.0
    predicted: int = 100
    found: set[str] = dataclasses.field(default_factory=set)
    instantiations: int = 0

    def worst(self, other: "Figures") -> None:
        self.registers = max(self.registers, other.registers)
        self.warps = min(self.warps, other.warps)
        if other.kb_in_flight - other.kb_needed < self.kb_in_flight - self.kb_needed:
            self.kb_in_flight, self.kb_needed = other.kb_in_flight, other.kb_needed
        self.instructions_per_byte = max(self.instructions_per_byte, other.instructions_per_byte)
        self.predicted = min(self.predicted, other.predicted)
        self.found |= other.found
        self.instantiations += 1


def figures(function: dict, threads: int, dynamic_shared: float) -> Figures:
    hot = function["hot"]
    traffic = max(hot["loads"] + hot["stores"], 1)
    one = Figures(registers=function["REG"], warps=warps(function, threads, dynamic_shared),
                  instructions_per_byte=hot["instructions"] / traffic, instantiations=1)
    one.kb_in_flight = one.warps * 32 * hot["in_flight"] / 1024
    one.kb_needed = KB_NEEDED * hot["loads"] / traffic
    is_found = {"call": hot["calls"], "half-sector": hot["half_sector"],
                "narrow": not hot["wide_loads"] and not hot["wide_stores"],
                # a path for unaligned arrays has as many of each
                "words": hot["by_words"] > hot["wide_stores"]}
    one.found = {what for what, yes in is_found.items() if yes}
    enough = min(1.0, one.kb_in_flight / one.kb_needed) if one.kb_needed else 1.0
    issue = min(1.0, INSTRUCTIONS_PER_BYTE / one.instructions_per_byte)
    one.predicted = round(BEST * enough * issue * (0.95 if hot["half_sector"] else 1.0))
    return one


def violations(name: str, is_: Figures, budget: Budget | None) -> list[str]:
    if budget is None:
        return [f"{name} has no row in tools/checks/kernel_budgets.tsv; now: {proposed(name, is_)}"]
    wrong = []
    if is_.registers > budget.registers:
        wrong.append(f"{name}: {is_.registers} registers; its budget is {budget.registers}")
    if is_.kb_in_flight < budget.kb_in_flight:
        wrong.append(f"{name}: {is_.kb_in_flight:.1f} KB of loads in flight on a multiprocessor; its budget "
                     f"is {budget.kb_in_flight:g}")
    if is_.instructions_per_byte > budget.instructions_per_byte:
        wrong.append(f"{name}: {is_.instructions_per_byte:.2f} instructions per byte in its hot loop; its "
                     f"budget is {budget.instructions_per_byte:g}")
    what = {"call": "calls a subroutine in its hot loop (a division or a root?)",
            "half-sector": "stores half sectors: two 16-byte stores of one thread are adjacent",
            "narrow": "has no 16-byte access in its hot loop",
            "words": "stores vectors of four words in four instructions in its hot loop"}
    wrong += [f"{name} {what[one]}" for one in sorted(is_.found - budget.allowed)]
    wrong += [f"{name}: tools/checks/kernel_budgets.tsv allows {one}, which it does not need: remove it"
              for one in sorted(budget.allowed - is_.found)]
    outside = (budget.allowed or budget.kb_in_flight < int(is_.kb_needed)
               or budget.instructions_per_byte > INSTRUCTIONS_PER_BYTE)
    if outside and not budget.reason:
        wrong.append(f"{name}: its row in tools/checks/kernel_budgets.tsv is outside the limits for all "
                     "kernels: add a reason")
    return wrong


def violations_on_any(function: dict, used: Launched) -> list[str]:
    """Returns the errors of a function on any architecture, and of its largest launch in a test."""
    where, architecture = f"{function['full']} on {function['architecture']}", function["architecture"]
    wrong = []
    if function["local"] or function["STACK"] or function["LOCAL"]:
        wrong.append(
            f"{where} uses local memory: {function['local']} accesses, {function['STACK']} bytes of stack")
    if architecture == PINNED and not function["waits"]:
        wrong.append(f"{where} does not wait for earlier kernels before it branches or accesses global memory: "
                     "begin it with wait_for_earlier_kernels()")
    if used.threads > function["threads"]:
        wrong.append(f"{where} was launched with {used.threads} threads; its __launch_bounds__ allow "
                     f"{function['threads']}")
    if used.threads * function["REG"] > REGISTERS:
        wrong.append(f"{where}: {used.threads} threads of {function['REG']} registers do not fit; give it "
                     f"__launch_bounds__({used.threads})")
    most = MOST_SHARED["sm_90"] if base_name(function["full"]) in ASK_FIRST else MOST_SHARED.get(architecture)
    if used.threads and most and used.shared + function["SHARED"] > most:
        wrong.append(f"{where}: {used.shared + function['SHARED']} bytes of shared memory; a block has at "
                     f"most {most}")
    return wrong


def wrong_accesses(root: pathlib.Path, functions: list[dict]) -> list[str]:
    """Returns the kernels whose 16-byte accesses are not those in the table of docs/gpu.md."""
    found: dict[str, set[str]] = {}
    for function in functions:
        found.setdefault(base_name(function["full"]), set()).update(function["wide"].split("+"))
    wrong = []
    for name, row in kernels_in_table(root).items():
        now = "+".join(sorted(found.get(name, set()) - {"-"})) or "-"
        if name in found and now != row.wide.split()[0]:
            wrong.append(f"docs/gpu.md says {name} makes 16-byte accesses: {row.wide.split()[0]}; its "
                         f"machine code: {now}")
    return wrong


def proposed(name: str, is_: Figures) -> str:
    return "\t".join(
        (name, "256", "0", str((is_.registers + 7) // 8 * 8), str(int(min(is_.kb_in_flight, KB_NEEDED))),
         f"{int(is_.instructions_per_byte * 10 + 1) / 10:g}", ",".join(sorted(is_.found)) or "-"))


def measurements(pages: str) -> dict[str, str]:
    """Returns the measured fraction of copy bandwidth by kernel, from docs/gpu.md's table of kernels: the
    H200's, as the prediction is, or else the H100's.

    For kernels with several ops, returns it by kernel and op, from the table of machine code, where these
    cells are written by hand.
    """
    found = {}
    for line in pages.splitlines():
        if match := ROW.match(line):
            h200, h100 = (cell.strip() for cell in match.group(2).split("|")[-2:])
            found[match.group(1)] = h200 if h200 != "-" or h100 == "-" else f"H100: {h100}"
        elif re.match(r"\| \w+\(\w+\) \|", line):
            cells = [cell.strip() for cell in line.split("|")]
            found[cells[1]] = cells[8]
    return found


def table(all_: dict[str, Figures], budgets: dict[str, Budget], measured: dict[str, str],
          toolkit: str) -> str:
    lines = [GENERATED[0], f"From nvcc {toolkit}, for {PINNED}; where a kernel has several instantiations, "
             "the worst of those with 16-byte accesses.", "",
             "| kernel | forms | registers | warps/SM | KB in flight (enough) | instructions/B | predicted % "
             "of copy | measured | outside the limits because |", "|---" * 9 + "|"]
    for name, one in sorted(all_.items()):
        reason = budgets[name].reason if name in budgets else ""
        seen = measured.get(name, "not timed" if "(" in name else "")
        timed = seen != "-"
        lines.append(
            f"| {name} | {one.instantiations} | {one.registers} | {one.warps} | {one.kb_in_flight:.0f} "
            f"({one.kb_needed:.0f}) | {one.instructions_per_byte:.1f} | {one.predicted if timed else '-'} | "
            f"{seen} | {reason} |")
    return "\n".join([*lines, GENERATED[1]])


def differs(one: str, other: str) -> bool:
    """Returns whether two results of table() differ in more than nvcc's choice of registers.

    nvcc chooses registers by the names of functions, among others, and a name in an unnamed namespace has a
    hash of the source's path. So registers and instructions per byte may differ by 15 %, and the figures that
    follow from them by more. kernel_budgets.tsv has the limits.
    """
    if one.count("\n") != other.count("\n"):
        return True
    for a, b in zip(*([line.split("|") for line in text.splitlines()] for text in (one, other))):
        if a[:3] + a[8:] != b[:3] + b[8:]:
            return True
        if a[2:3] and a[2].strip().isdigit() and any(
                abs(float(a[column]) - float(b[column])) > max(0.11, 0.15 * float(a[column]))
                for column in (3, 6)):
            return True
    return False


def objects(build: pathlib.Path) -> list[pathlib.Path]:
    """Returns the CUDA objects of the build's sources, without those of files that were moved or deleted."""
    commands = json.loads((build / "compile_commands.json").read_text())
    outputs = (re.search(r" -o ((?:kernels|runtime|collectives)/\S+\.cu\.o)", entry["command"])
               for entry in commands)
    return sorted(build / output[1] for output in outputs if output)


def toolkit_of(build: pathlib.Path) -> str:
    for path in build.glob("CMakeFiles/*/CMakeCUDACompiler.cmake"):
        if match := re.search(r'CMAKE_CUDA_COMPILER_VERSION "(\d+\.\d+)', path.read_text()):
            return match.group(1)
    return "?"


def contracted(build: pathlib.Path) -> list[str]:
    """Returns the sources in which nvcc must not contract a product and an addition, but may.

    With contraction, the results would differ from the host's results.
    """
    commands = json.loads((build / "compile_commands.json").read_text())
    return [f"{entry['file']} is compiled without --fmad=false" for entry in commands
            if re.search(r"/kernels/(wire|randk|passes)/[^/]*\.cu$", entry["file"])
            and "nvcc" in entry["command"] and "--fmad=false" not in entry["command"]]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--all", action="store_true")
    add_launched(parser)
    options = parser.parse_args()
    os.environ["PATH"] += os.pathsep + str((options.build / "disassembler/bin").resolve())
    if missing := [tool for tool in ("cuobjdump", "nvdisasm") if shutil.which(tool) is None]:
        print(f"SKIPPED: the machine code was not checked: no {' and no '.join(missing)}. "
              "`scripts/cuda_pip.sh disassembler` installs them (5 MB) in build/disassembler.")
        return SKIPPED
    cache = options.build / "machine_code"
    cache.mkdir(exist_ok=True)
    read = [function for path in objects(options.build) for function in machine_code.examine(path, cache)]
    if not any(function["architecture"] == PINNED for function in read):
        print(f"SKIPPED: this build has no code for {PINNED}")
        return SKIPPED
    budgets = read_budgets(options.root / "tools/checks/kernel_budgets.tsv")
    launched = launched_by_name(options, set(kernels_in_table(options.root))) if options.launched else {}
    wrong, worst = contracted(options.build) + wrong_accesses(options.root, read), {}
    for function in read:
        full, architecture = function["full"], function["architecture"]
        wrong += violations_on_any(function, launched.get(full, Launched()))
        if architecture != PINNED:
            continue
        name = label(full)
        budget = budgets.get(name)
        one = figures(function, budget.threads if budget else 256,
                      1024 * budget.dynamic_shared_kb if budget else 0)
        if options.all:
            print(f"{proposed(name, one)}\t{one.warps} warps\t{one.predicted} %\t{full}")
        best = worst.setdefault(name, Figures())
        if "narrow" in best.found and "narrow" not in one.found:
            best = worst[name] = Figures()  # ignore scalar forms, which are for unaligned arrays
        if "narrow" not in one.found or not best.instantiations or "narrow" in best.found:
            best.worst(one)
    for name, one in sorted(worst.items()):
        wrong += violations(name, one, budgets.get(name))
    wrong += [f"tools/checks/kernel_budgets.tsv: no kernel has the name {name}" for name in budgets
              if name not in worst]

    page = options.root / "docs/results/machine-code.md"
    text = page.read_text()
    kernels = (options.root / "docs/gpu.md").read_text()
    toolkit = toolkit_of(options.build)
    now = table(worst, budgets, measurements(kernels + text), toolkit)
    before, _, rest = text.partition(GENERATED[0])
    there, _, after = rest.partition(GENERATED[1])
    if options.write:
        old = {row.split("|")[1]: row for row in there.splitlines() if "|" in row}
        rows = [(row, old.get(row.split("|")[1], row) if "|" in row else row) for row in now.splitlines()]
        page.write_text(before + "\n".join(row if differs(was, row) else was for row, was in rows) + after)
    elif f"From nvcc {toolkit}," in there and differs(GENERATED[0] + there + GENERATED[1], now):
        wrong.append("the table of docs/results/machine-code.md is out of date: run make machine-code")
    architectures = sorted({function["architecture"] for function in read})
    return gate.end(wrong, f"{len(worst)} kernels within their budgets, {len(read)} functions without local "
                    f"memory ({', '.join(architectures)})")


if __name__ == "__main__":
    sys.exit(main())
