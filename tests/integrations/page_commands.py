#!/usr/bin/env python3
"""Runs every shell command of README and of the pages as printed, in the state that the page describes.

    page_commands.py BUILD GROUP...    runs the commands of these GROUPS of pages (GROUPS)
    page_commands.py --list            prints each command, and how it runs

A page's commands run one after the other in a new folder, which looks like a checkout in which BUILD has
built the programs. In README, a block after the words "After `make build`" has what `make build` builds;
earlier blocks have only build/bin/gradwire, which is all that `make demo` builds. A new command of a page
runs as printed. Only long commands, and commands that need another machine, have a row in SHORTER or NOT_RUN.
tools/checks/check_commands.py fails for a block that is neither of commands nor in OTHER, and for a row
without a command.
"""
from __future__ import annotations

import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import Counter, Dict, Iterator, List, NamedTuple, Set, Tuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The pages of each of the tests. The last group has all other pages.
GROUPS: Dict[str, List[str]] = {
    "readme": ["README.md", "CONTRIBUTING.md", "integrations/python/README.md"],
    "researchers": ["docs/for-researchers.md", "docs/checkpoints.md"],
    "results": ["docs/results.md"],
    "others": []}
PROGRAMS = re.compile(
    r"(sudo |[A-Z_]+=\S* )*(make|gradwire(-bench)?|python3?|pip3?|pipx|apt(-get)?|git|docker|curl|torchrun|"
    r"mpirun|srun|sbatch|cmake|ctest|nsys|man|export|cd|for|source|g\+\+|cc|"
    r"(build|scripts|bench|tools|env|\.)/[\w./-]*|\\)( |$)")
# Texts of shell commands that take long, and what they become in the test, as in re.sub. Several may apply.
SHORTER: List[Tuple[str, str]] = [
    (r"^make ", "make --dry-run "),
    (r"--epochs [\d.]+", "--steps 4"),
    (r"--steps \d+(?= |$)", "--steps 4"),
    (r"--dump-gradients \d+", "--dump-gradients 3"),
    (r"--model vit_[bl]_\d+ .*(?=--log|--memory-limit)", r"\g<0>--dry-run "),
    (r"--compression shelf", r"\g<0> --dry-run"),
    (r"(?<=_tests )--gtest_\w+=\S+", r"\g<0> --gtest_list_tests"),
    (r"--stop 50ms", "--stop 0.1ms"),
    (r"--(min|max)-size \S+", r"--\1-size 64K"),
    (r"gradwire-bench kernels(?!.*max-size)", r"\g<0> --max-size 64K"),
    (r"gradwire-bench kernels(?!.*--stop)", r"\g<0> --stop 0.1ms"),
    (r"gradwire-bench formats", r"\g<0> --stop 0.1ms --size 64K --draws 2"),
    (r"gradwire-bench numerics", r"\g<0> --ranks 2"),
    (r"gradwire-bench hook", r"\g<0> --stop 1"),
    (r"(?<=gradwire-bench hook --stop 1)( --model \w+)?", r" --model vit_tiny"),
    (r"gradwire-bench collectives", r"\g<0> -n 1 -w 0"),
    (r"-e 64M|(?<=collectives -n 1 -w 0)$", " -e 1M --schedule ring --compression bf16"),
    (r"(?<=-w 0) --transport tcp", r"\g<0> -e 1M"),
    (r"(?<=gradwire train --data fashion-mnist)(?= &|$)", " --steps 4"),
    (r"--data arrays:data", r"\g<0> --batch-size 2 --dry-run"),
    (r"done; wait$", "done; for job in $(jobs -p); do wait $job || exit 1; done"),  # wait is 0
    (r"--link 100Mbit", r"\g<0> --steps 4"),
    (r"^gradwire-bench compare A.json B.json", r"cp A.json B.json && \g<0>"),  # the page: by another build
]
# Makes the files that a page's reader has.
STATE: Dict[str, str] = {
    "docs/plan.md": "cp trainer/plan/clusters/h100-ib.json cluster.json",
    "docs/results.md": "gradwire train --data synthetic --steps 2 --dump-gradients 1:dumped",
    "docs/training.md": "gradwire compare --data synthetic --ranks 2 --steps 2 --compression bf16"
                        " --json result.json && cp result.0.jsonl run.jsonl && mkdir -p photos/a photos/b && for i"
                        " in $(seq 12); do cp docs/demo.png photos/a/$i.png; done; cp docs/*.png photos/b"}
# Beginnings of shell commands, as in re.match, that no test runs as printed, each with the reason.
NOT_RUN: List[Tuple[str, str]] = [
    (r"cmake --(preset|build)|scripts/configure.sh", "builds what this test runs"),
    (r"cmake --install", "writes to /opt; tests/capi/installed_test.py installs the library elsewhere"),
    (r"pip install|python3 -m venv|env/bin/", "installs packages, as do the test smoke_wheel and"
     " tests/integrations/new_environments.py"),
    (r"python -m gradwire.doctor --model", "needs the reader's file; package_test.py runs it with a model"),
    (r"(torchrun|srun) (-\S+ (\S+ )?|\.\.\. )*gradwire|torchrun --standalone", "needs torchrun of PyTorch 2,"
     " or Slurm; launchers and torchrun_restarts run torchrun, trainer_tests set Slurm's variables"),
    (r"export LD_PRELOAD=|torchrun --nproc-per-node 8 train.py", "needs several GPUs;"
     " tests/nccl/interposer_test.py has a stand-in for NCCL"),
    (r"\[ \$\? -ne 138", "needs Slurm; tests/cli/interruption_test.py checks the exit code"),
    (r"gradwire train --elastic", "one of several processes; tests/processes/elastic_test.cpp"),
    (r"RANK=\d", "one of several processes; tests/cli/processes_test.py"),
    (r"sudo bench/harness/shaped_link.sh", "needs root; the tests smoke_slow_links and smoke_emulated_links"),
    (r"nsys|gradwire train .* --graph", "needs a GPU"),
    (r"docker build", "needs Docker and a network; scripts/fresh_debian.sh has a bare Debian"),
    (r"build/bin/gradwire export --tensorboard", "needs tensorboard; tests/cli/report_test.py"),
    (r"scripts/(golden.py|fresh_debian.sh)", "takes minutes; the tests smoke_golden and smoke_fresh_debian"),
]
# Beginnings of blocks that are not commands. Blocks of other languages in fences name their language instead.
OTHER = ("Over emulated links of", "backward: gradients", "[![ci]", "from gradwire.torch import",
         "runs/b32/step-000000500/", "model = torchvision", "step = compute", "rank 0: call 6",
         "ranks disagree:", "connection lost (", "gw_comm_query", "sum over ranks of", "reduce-scatter",
         "702 steps in", "Rank 2 was", "include/gradwire/gradwire.h")
SHELL = ("", "sh", "bash", "console")  # languages of blocks that may be commands
# The fenced and the indented blocks of a page.
BLOCKS = re.compile(r"(?ms)^```(?P<language>[^\n]*)\n(.*?)^```|(?<=\n\n)( {4}[^\n]*(?:\n+ {4}[^\n]*)*)")
# The commands of a block. Lines that end with a backslash continue.
COMMANDS = re.compile(r"(?ms)^(?:for .*?\bdone\b|(?:[^\n]*\\\n)*)[^\n]*")
# The pages of page_examples.py, whose other blocks that program runs.
EXAMPLES = {"docs/" + name + ".md"
            for name in ("for-pytorch", "for-fsdp", "for-jax", "for-trainers", "extending")}
OPTIONAL = {"mpirun", "srun"}  # programs that a machine may lack


class Block(NamedTuple):
    page: str
    line: int  # of the first line, from 1
    lines: List[str]
    language: str  # "" if unknown
    before: str  # the page's text before the block

    @property
    def of_commands(self) -> bool:
        first = next((line for line in self.lines if line and not line.startswith("#")), "")
        return self.language in SHELL and bool(PROGRAMS.match(first))


class Command(NamedTuple):
    block: Block
    line: int
    text: str  # without a comment after it
    reason: str  # why it does not run; "" if it runs
    shorter: str  # what runs

    @property
    def place(self) -> str:
        return f"{self.block.page}:{self.line}"

    @property
    def way(self) -> str:
        return ("not run" if self.reason else "as printed" if self.shorter == self.text
                else "in a shorter form")


def pages() -> List[str]:
    docs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
    return [*GROUPS["readme"], *docs]


def blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for match in BLOCKS.finditer(text):
        before = text[:match.start(match.lastindex or 0)]
        lines = textwrap.dedent(match[match.lastindex or 0]).rstrip().split("\n")
        yield Block(page, before.count("\n") + 1, lines, (match["language"] or "").strip(), before)


def shorten(text: str) -> Tuple[str, Set[str]]:
    """Returns what runs for a command, and the patterns of SHORTER that apply."""
    used = set()
    for pattern, instead in SHORTER:
        text, count = re.subn(pattern, instead, text)
        used |= {pattern} if count else set()
    return text, used


def commands_of(block: Block) -> Iterator[Command]:
    text = "\n".join(block.lines)
    for match in COMMANDS.finditer(text):
        words = re.sub(r" {2,}", " ", re.sub(r"\s*\\\n", " ", match[0]))
        words = re.sub(r"(^|\s+)# .*|^#.*", "", words).strip()
        if words:
            reason = next((why for pattern, why in NOT_RUN if re.match(pattern, words)), "")
            line = block.line + text.count("\n", 0, match.start())
            yield Command(block, line, words, reason, shorten(words)[0])


def all_commands() -> List[Command]:
    return [command for page in pages() for block in blocks_of(page) if block.of_commands
            for command in commands_of(block)]


def make_checkout(folder: pathlib.Path, build: pathlib.Path) -> None:
    """Makes a folder that looks like this checkout, without programs."""
    for path in ROOT.iterdir():
        if not path.name.startswith("build") and path.name not in (".git", "dist"):
            (folder / path.name).symlink_to(path)
    (folder / "build/bin").mkdir(parents=True)
    (folder / "build/lib").symlink_to(build / "lib")
    (folder / ".bin").mkdir()
    for name in ("python", "python3"):
        (folder / ".bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (folder / ".bin" / name).chmod(0o755)


def add_programs(folder: pathlib.Path, build: pathlib.Path, pattern: str) -> None:
    for program in (build / "bin").glob(pattern):
        if not (folder / "build/bin" / program.name).exists():
            (folder / "build/bin" / program.name).symlink_to(program)


def run_page(page: str, build: pathlib.Path) -> Tuple[Counter[str], List[str]]:
    """Runs a page's commands. Returns how many ran in which way, and the failures."""
    counts: Counter[str] = collections.Counter()
    failures = []
    with tempfile.TemporaryDirectory(prefix="gradwire-page-") as name:
        folder = pathlib.Path(name)
        make_checkout(folder, build)
        add_programs(folder, build, "gradwire" if page == "README.md" else "*")
        environment = {
            **os.environ, "PATH": f"{folder}/.bin:{folder}/build/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "integrations/python"), "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1", "GRADWIRE_LIBRARY": str(build / "lib/libgradwire.so"),
            **{f"OMPI_{name}": "1" for name in ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM",
                                                "MCA_rmaps_base_oversubscribe")}}
        subprocess.run(["bash", "-c", STATE.get(page, "")], cwd=folder, env=environment, check=True,
                       stdout=subprocess.DEVNULL)
        for block in filter(lambda b: b.of_commands, blocks_of(page)):
            if re.search("after `make build`", block.before, re.IGNORECASE):
                add_programs(folder, build, "*")
            exports = ""
            for command in commands_of(block):
                program = command.text.split()[0]
                reason = command.reason or (f"{program} is not installed here" if program in OPTIONAL
                                            and not shutil.which(program) else "")
                counts[command.way if not reason else "not run"] += 1
                if reason:
                    print(f"{command.place}: not run: {command.text}\n    {reason}", flush=True)
                    continue
                exports += f"{command.text}\n" if program == "export" else ""
                begin = time.monotonic()
                done = subprocess.run(["timeout", "400", "bash", "-c", exports + command.shorter], cwd=folder,
                                      text=True, env=environment, stdin=subprocess.DEVNULL,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                print(f"{command.place}: {time.monotonic() - begin:.1f} s: {command.shorter}", flush=True)
                if done.returncode:
                    failures.append(f"{command.place}: exit code {done.returncode} (124: after 400 s; add a "
                                    f"shorter form to SHORTER): {command.shorter}\n{done.stdout[-1500:]}")
    return counts, failures


def main() -> int:
    if sys.argv[1:] == ["--list"]:
        for command in all_commands():
            print(f"{command.place}: {command.text}\n    {command.way}: {command.reason or command.shorter}")
        return 0
    build, groups = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    named = {page for group in GROUPS.values() for page in group}
    GROUPS["others"] = [page for page in pages() if page not in named]
    totals: Counter[str] = collections.Counter()
    failures = []
    for page in [page for group in groups for page in GROUPS[group]]:
        counts, failed = run_page(page, build)
        totals += counts
        failures += failed
    print("Commands: " + ", ".join(f"{count} {way}" for way, count in totals.items()))
    print("\n".join(f"FAILED: {failure}" for failure in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
