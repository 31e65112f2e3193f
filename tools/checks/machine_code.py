"""Reads the machine code (SASS) of compiled CUDA kernels with cuobjdump, and measures their hot loops.

The figures are counts, not measurements: every instruction between the first and last of a loop counts once,
whether or not branches skip it, and inner loops count once.
"""
import dataclasses
import hashlib
import json
import math
import pathlib
import re
import subprocess

FUNCTION = re.compile(r"^\s*Function : (\S+)")
ARCHITECTURE = re.compile(r"^\s*(?:code for|\.target)\s+(sm_\w+)")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
REGISTER = re.compile(r"\bR(\d+)(\.64)?")
ADDRESS = re.compile(r"\[(R\d+)(?:\.\w+)*(?:\+(-?0x[0-9a-f]+))?\]")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


@dataclasses.dataclass
class Instruction:
    at: int
    predicate: str | None
    operation: str  # operation with suffixes: LDG.E.128.CONSTANT
    operands: str

    @property
    def name(self) -> str:
        return self.operation.split(".")[0]

    @property
    def bytes(self) -> int:
        """Returns the number of bytes that one thread moves."""
        parts = self.operation.split(".")
        for suffix, size in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
            if suffix in parts[1:]:
                return size
        return 4

    @property
    def wide(self) -> bool:
        return self.bytes == 16

    def registers(self, operands: str) -> list[int]:
        return [int(m[1]) + i for m in REGISTER.finditer(operands) for i in range(2 if m[2] else 1)]

    def written(self) -> list[int]:
        """Returns the registers that a load fills."""
        first = self.registers(self.operands.split(",")[0])
        return [first[0] + i for i in range((self.bytes + 3) // 4)] if first else []

    def read(self) -> list[int]:
        destination, _, sources = self.operands.partition(",")
        if self.name.startswith("ST"):
            value = self.registers(self.operands.rpartition(",")[2])
            wide = [value[0] + i for i in range((self.bytes + 3) // 4)] if value else []
            return self.registers(destination) + wide
        return self.registers(sources)


@dataclasses.dataclass
class Function:
    name: str  # mangled name
    architecture: str
    code: list[Instruction] = dataclasses.field(default_factory=list)


def functions(text: str) -> list[Function]:
    """Returns every function in the output of `cuobjdump -sass`."""
    found: list[Function] = []
    architecture = ""
    for line in text.splitlines():
        if match := ARCHITECTURE.match(line):
            architecture = match.group(1)
        elif match := FUNCTION.match(line):
            found.append(Function(match.group(1), architecture))
        elif found and (match := INSTRUCTION.match(line)):
            found[-1].code.append(
                Instruction(int(match.group(1), 16), match.group(2), match.group(3), match.group(4)))
    return found


LOADS = ("LDG", "LDGSTS")  # loads to registers, and to shared memory (cp.async)


def moved(code: list[Instruction], names: tuple[str, ...] = (*LOADS, "STG"), only_wide: bool = False) -> int:
    return sum(i.bytes for i in code if i.name in names and (i.wide or not only_wide))


def hot_loop(function: Function) -> tuple[list[Instruction], bool]:
    """Returns the function's hot loop, and True; without a loop, the code up to the last exit, and False.

    The hot loop moves the most bytes to and from global memory in 16-byte accesses. Of equal loops, takes the
    shortest.
    """
    code = function.code
    index = {instruction.at: i for i, instruction in enumerate(code)}
    best: list[Instruction] = []
    for i, instruction in enumerate(code):
        target = TARGET.search(instruction.operands)
        if instruction.name != "BRA" or not target or int(target.group(1), 16) >= instruction.at:
            continue
        body = code[index[int(target.group(1), 16)]:i + 1]
        rank = (moved(body, only_wide=True), moved(body), -len(body))
        if moved(body) and (not best or rank > (moved(best, only_wide=True), moved(best), -len(best))):
            best = body
    if best:
        # A kernel without a main loop may have small loops, for example over a few partial sums.
        if 2 * moved(best, only_wide=True) >= moved(code, only_wide=True):
            return best, True
    exits = [i for i, instruction in enumerate(code) if instruction.name == "EXIT"]
    return code[:exits[-1] + 1 if exits else len(code)], False


def bytes_in_flight(body: list[Instruction], is_loop: bool) -> int:
    """Returns the most bytes of global loads that a thread has in flight at once.

    A load, and all earlier loads, end at the first instruction that reads the loaded register, because a
    thread issues in order. The count covers two iterations of a loop, so that it includes prefetches. Copies
    to shared memory form groups, which end at LDGDEPBAR; the loop waits until a number of groups are left
    (DEPBAR). Where there are copies of 16 bytes, shorter ones are for unaligned arrays, and don't count.
    """
    waiting: list[tuple[set[int], int]] = []
    copies = [i.bytes for i in body if i.name == "LDGSTS"]
    copies = [size for size in copies if size == max(copies)]
    left = [int(match.group(1), 16) for i in body if i.name == "DEPBAR"
            and (match := re.match(r"SB0, 0x([0-9a-f]+)", i.operands))]
    groups = max(1, sum(i.name == "LDGDEPBAR" for i in body))
    most = sum(copies) // groups * (max(left) + 1) if copies and left else 0
    for instruction in body * (2 if is_loop else 1):
        read = set(instruction.read())
        for position in range(len(waiting) - 1, -1, -1):
            if waiting[position][0] & read:
                waiting = waiting[position + 1:]
                break
        if instruction.name == "LDG":
            waiting.append((set(instruction.written()), instruction.bytes))
            most = max(most, sum(size for _, size in waiting))
    return most


def half_sector_stores(body: list[Instruction]) -> int:
    """Returns the number of pairs of 16-byte stores of one thread to adjacent addresses.

    Each store of a warp then skips every other 16 bytes: half of each 32-byte sector.
    """
    places = set()
    pairs = 0
    for instruction in body:
        if instruction.name != "STG" or not instruction.wide:
            continue
        match = ADDRESS.search(instruction.operands)
        if not match:
            continue
        base, offset = match.group(1), int(match.group(2) or "0", 16)
        pairs += ((base, offset - 16) in places) + ((base, offset + 16) in places)
        places.add((base, offset))
    return pairs


def vectors_stored_by_words(body: list[Instruction]) -> int:
    """Returns the number of vectors of four words that a thread stores in four instructions."""
    offsets: dict[str, set[int]] = {}
    for instruction in body:
        match = ADDRESS.search(instruction.operands)
        if instruction.name == "STG" and instruction.bytes == 4 and match:
            offsets.setdefault(match.group(1), set()).add(int(match.group(2) or "0", 16))
    vectors = 0
    for places in offsets.values():
        for offset in sorted(places):
            vector = {offset + 4 * i for i in range(4)}
            if vector <= places:
                places -= vector
                vectors += 1
    return vectors


def waits_first(code: list[Instruction]) -> bool:
    """Returns whether a thread waits for earlier kernels before it branches or accesses global memory."""
    for instruction in code:
        if instruction.name == "ACQBULK":
            return instruction.predicate is None
        if instruction.name in (*LOADS, "STG", "LD", "ST", "ATOM", "ATOMG", "RED", "UBLKCP", "BRA", "EXIT"):
            return False
    return False


def measure(function: Function) -> dict:
    """Returns the accesses to local memory ("local"), whether the function waits for earlier kernels ("waits"),
    and the properties of the hot loop ("hot").

    "loads", "stores" and "in_flight" are bytes per thread and iteration, "wide_loads" and "wide_stores"
    accesses of 16 bytes, "half_sector" pairs of stores, "by_words" vectors that are stored word by word.
    """
    body, is_loop = hot_loop(function)
    hot = {"loads": moved(body, LOADS), "stores": moved(body, ("STG",)),
           "instructions": sum(i.name != "NOP" for i in body), "in_flight": bytes_in_flight(body, is_loop),
           "wide_loads": sum(i.wide for i in body if i.name in LOADS),
           "wide_stores": sum(i.wide for i in body if i.name == "STG"),
           "half_sector": half_sector_stores(body), "by_words": vectors_stored_by_words(body),
           "calls": sum(i.name == "CALL" for i in body), "is_loop": is_loop}
    return {"hot": hot, "waits": waits_first(function.code),
            "local": sum(i.name in ("LDL", "STL") for i in function.code)}


def wide_accesses(function: Function) -> str:
    """Returns the operations (ld, st) that access global memory 16 bytes at a time, such as ld+st."""
    kinds = {"st" if i.name == "STG" else "ld" for i in function.code if i.wide and i.name in (*LOADS, "STG")}
    return "+".join(sorted(kinds)) or "-"


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def resources(text: str) -> dict[str, dict[str, dict[str, int]]]:
    """Returns REG, STACK, SHARED, LOCAL of `cuobjdump -res-usage`: architecture -> function -> values."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    architecture = name = ""
    for line in text.splitlines():
        if match := re.match(r"\s*(?:arch = |code for )(sm_\w+)", line):
            architecture = match.group(1)
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match.group(1)
        elif name and "REG:" in line:
            values = re.findall(r"(\w+):(\d+)", line)
            found.setdefault(architecture, {})[name] = {key: int(value) for key, value in values}
            name = ""
    return found


LIMIT = re.compile(r"^arch = (sm_\w+)|^\.nv\.info\.(\S+)|EIATTR_MAX_THREADS\s+Format:\s+\w+\s+"
                   r"Value:\s+0x(\w+) 0x(\w+) 0x(\w+)", re.M)


def thread_limits(text: str) -> dict[tuple[str, str], int]:
    """Returns (architecture, function) -> the threads that its __launch_bounds__ allow, of `cuobjdump -elf`."""
    found, architecture, name = {}, "", ""
    for match in LIMIT.finditer(text):
        architecture, name = match.group(1) or architecture, match.group(2) or name
        if match.group(3):
            found[architecture, name] = math.prod(int(size, 16) for size in match.group(3, 4, 5))
    return found


def demangle(names: list[str]) -> dict[str, str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.splitlines()))


def examine(path: pathlib.Path, cache: pathlib.Path) -> list[dict]:
    """Returns the properties of each function of an object and architecture, as dictionaries."""
    stamp = hashlib.sha256(path.read_bytes() + pathlib.Path(__file__).read_bytes()).hexdigest()
    kept = cache / (path.name + ".json")
    if kept.exists():
        result = json.loads(kept.read_text())
        if result["stamp"] == stamp:
            return result["functions"]
    used, limits = (read(run(["cuobjdump", option, str(path)]))
                    for read, option in ((resources, "-res-usage"), (thread_limits, "-elf")))
    found = functions(run(["cuobjdump", "-sass", str(path)]))
    if not found:
        raise SystemExit(f"cuobjdump finds no machine code in {path}")
    full = demangle([function.name for function in found])
    result = [{"full": full[f.name], "architecture": f.architecture, **used[f.architecture][f.name],
               "threads": limits.get((f.architecture, f.name), 1024), "wide": wide_accesses(f),
               **measure(f)} for f in found]
    kept.write_text(json.dumps({"stamp": stamp, "functions": result}))
    return result
