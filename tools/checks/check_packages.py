#!/usr/bin/env python3
"""Checks that scripts/setup.sh installs every package that the build, the tests and the scripts use.

    check_packages.py ROOT BUILD

A machine that tests Gradwire has packages that a user's machine lacks, so a missing entry in setup.sh's list
shows only on a bare Debian (scripts/fresh_debian.sh). This check does not depend on other installed packages:
each system header and library of the build in BUILD, each command of the scripts, and each Python module must
belong to a package in the closure of setup.sh's list, or to the base system (debootstrap's minbase, make and
git). The closure follows Depends and Pre-Depends, not Recommends, as setup.sh does. What `make demo` uses must
belong to the closure of the packages of `setup.sh demo`.

The Dockerfile, .devcontainer and .github/workflows must install these packages, and run what exists.

Then takes one package of each kind from the list, which the check must notice. Exits with 77 on systems
without dpkg.
"""
import ast
import collections
import pathlib
import re
import subprocess
import sys

import gate

BASE = ("make", "git", "apt")
# What `make demo` builds, and the files that it runs.
DEMO_TARGET = "gradwire"
DEMO_FILES = re.compile(r"scripts/(setup|configure|demo)\.sh|bench/plots/\w+\.py|trainer/report/[pr]e\w+\.py")
# Optional programs and modules. Each entry describes the behavior without the program or module.
OPTIONAL_COMMANDS = {
    "clang++": "make soak SOAK=fuzz reports that it needs clang",
    "nvcc": "the CUDA side is left out",
    "nvidia-smi": "no GPU",
    "cuobjdump": "the machine-code check is skipped",
    "nvdisasm": "the machine-code check is skipped",
    "compute-sanitizer": "make gpu-check reports it",
    "ncu": "make gpu-check reports it",
    "perf": "make host-check reports it",
    "debootstrap": "scripts/fresh_debian.sh reports it",
    "sudo": "setup.sh names the packages that are not installed",
    "gcc": "the compiler's own name on the machine",
    "srun": "its variables are tested without it",
    "mpirun": "its variables are tested without it",
    "torchrun": "make test-frameworks installs it",
    "pkg-config": "capi_installed leaves that part out",
}
# Modules that make test-frameworks, make docs or make wheel installs into separate folders below build/, and
# one that a user of to_arrays.py installs.
OPTIONAL_MODULES = {"jax", "jaxlib", "optax", "flax", "lightning", "pytorch_lightning", "accelerate",
                    "transformers", "ray", "deepspeed", "torchtitan", "megatron", "mkdocs", "auditwheel",
                    "tensorboard", "datasets"}
PLURALS = {"header": "headers", "library": "libraries", "command": "commands", "module": "Python modules"}
# A package of each kind of use, and the text with which the check reports that the package is missing.
PLANTED = {"python3-matplotlib": "the list of scripts/setup.sh demo lacks python3-matplotlib",
           "libgtest-dev": "header /usr/include/gtest/", "libboost-context-dev": "library /usr/lib",
           "iproute2": "command ip", "python3-pip": "module pip"}
TOOL_FOLDERS = ("/usr/bin/", "/bin/", "/usr/sbin/", "/sbin/")
SHELL_WORDS = set(
    "if then else elif fi for while until do done case esac in function return exit local export set unset"
    " shift cd echo printf read test true false trap exec eval source wait kill type command mapfile declare"
    " break continue time let umask ulimit builtin select readonly pushd popd hash".split()
)


class Packages:
    """The installed packages, read from dpkg's database."""

    def __init__(self):
        fields = ("binary:Package", "Essential", "Priority", "Provides", "Pre-Depends", "Depends",
                  "db:Status-Status")
        lines = subprocess.run(["dpkg-query", "-W", "-f", "\t".join(f"${{{f}}}" for f in fields) + "\n"],
                               check=True, capture_output=True, text=True).stdout.splitlines()
        self.needs, self.base, self.providers = {}, set(BASE), collections.defaultdict(set)
        for line in lines:
            name, essential, priority, provides, before, needs, status = line.split("\t")
            name = name.split(":")[0]
            if status != "installed":
                continue
            self.needs[name] = [[self.bare(choice) for choice in group.split("|")]
                                for group in f"{before},{needs}".split(",") if group.strip()]
            for provided in provides.split(","):
                if provided.strip():
                    self.providers[self.bare(provided)].add(name)
            if essential == "yes" or priority == "required":
                self.base.add(name)
        self.owner = collections.defaultdict(set)
        for listing in pathlib.Path("/var/lib/dpkg/info").glob("*.list"):
            package = listing.stem.split(":")[0]
            for path in listing.read_text().splitlines():
                self.owner[merged(path)].add(package)

    @staticmethod
    def bare(dependency):
        return re.split(r"[\s(:]", dependency.strip())[0]

    def closure(self, names):
        """Returns `names` and all dependencies. Takes the first alternative, which apt installs on a bare
        machine."""
        found, open_names = set(), list(names)
        while open_names:
            name = open_names.pop()
            if name in found:
                continue
            found.add(name)
            for group in self.needs.get(name, []):
                first = group[0]
                if first in self.needs:
                    open_names.append(first)
                else:  # a virtual package, or a package that is not installed
                    open_names.extend(self.providers.get(first, ()))
                    if first not in self.providers and len(group) > 1:
                        open_names.extend(choice for choice in group[1:] if choice in self.needs)
        return found


def merged(path):
    """Returns the name of path on systems where /bin, /sbin and /lib are links into /usr."""
    return re.sub(r"^/(bin|sbin|lib|lib32|lib64|libx32)/", r"/usr/\1/", str(path))


def setup_list(root, lists):
    """Returns the packages of these lists of scripts/setup.sh."""
    text = (root / "scripts/setup.sh").read_text()
    groups = re.findall(rf"^(?:{'|'.join(lists)})=\((.*?)^\)", text, re.M | re.S)
    assert len(groups) == len(lists), f"scripts/setup.sh has not all of {lists}"
    return [entry.split(":")[0] for group in groups for entry in re.findall(r'"([^"]+)"', group)]


def build_files(build, goal):
    """Yields (file, target) of each header that the build reads outside the tree, and each linked library.
    With a goal, of the build of this target only."""
    def ninja(*tool):
        return subprocess.check_output(["ninja", "-C", build, "-t", *tool], text=True)

    goal, target = [goal] if goal else [], None
    inputs = set(ninja("inputs", *goal).split()) if goal else set()
    for line in ninja("deps").splitlines():
        if line.startswith("    "):
            if not goal or target in inputs:
                yield line.strip(), target
        elif line:
            target = line.split(":")[0]
    names = {}
    for line in ninja("commands", *goal).splitlines():
        if " -c " in line:
            continue
        target = re.search(r" -o (\S+)", line)
        for word in line.split():
            if re.fullmatch(r"/\S+\.(so|a)(\.[0-9.]+)?|-l[A-Za-z0-9_+.-]+", word):
                names.setdefault(word, target[1] if target else "a link")
    for name, target in names.items():
        if name.startswith("-l"):
            name = subprocess.run(["c++", f"-print-file-name=lib{name[2:]}.so"], capture_output=True,
                                  text=True).stdout.strip()
        if name.startswith("/"):
            yield name, target


def shell_commands(text):
    """Returns the command words of a shell script, without here-documents, comments and quoted text."""
    text = re.sub(r"<<-?\s*'?(\w+)'?.*?^\s*\1$", "", text, flags=re.M | re.S)
    text = re.sub(r"\\\n", " ", text)
    text = re.sub(r"(?m)(^|\s)#.*$", "", text)
    text = re.sub(r"'[^']*'", "QUOTED", text)  # programs of awk and sed
    text = re.sub(r"=\([^()]*\)", "=LIST", text)
    start = r"(?:^|[|&;({!]|\$\(|\bthen\b|\bdo\b|\belse\b|\bif\b|\bwhile\b|\bexec\b|\btime\b)\s*"
    prefix = r"(?:(?:\w+=\S*|env|nice|nohup|setsid|-[nu]\s*\S+|sudo)\s+)*"
    for match in re.finditer(start + prefix + r"([A-Za-z][A-Za-z0-9_+.-]*)(?=[\s;)|&<>\"]|$)", text, re.M):
        yield match[1]


def python_commands_and_modules(path):
    """Returns ("command" or "module", name) of each program that a Python file starts by a literal name, and
    of each import."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (("module", alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield "module", node.module
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if name in ("run", "Popen", "check_output", "check_call", "call") and isinstance(
                    first, (ast.List, ast.Tuple)):
                words = [e.value for e in first.elts if isinstance(e, ast.Constant)
                         and isinstance(e.value, str)]
                if first.elts and isinstance(first.elts[0], ast.Constant):
                    yield "command", words[0]
                interpreter = ast.unparse(first.elts[0]) if first.elts else ""
                for option, module in zip(words, words[1:]):
                    if option == "-m" and "python" in interpreter.replace("sys.executable", "python"):
                        yield "module", module
            elif name == "which" and isinstance(first, ast.Constant):
                yield "command", first.value


def uses(root):
    """Returns (kind, name, its user) of the commands and Python modules that scripts, tests and benches
    name."""
    names = gate.files(root)
    local = {part for name in names if name.endswith(".py")
             for part in pathlib.Path(name).with_suffix("").parts}
    for name in names:
        path = root / name
        if name.endswith(".sh") or name in ("Makefile", ".ci/run"):
            text = path.read_text()
            functions = set(re.findall(r"^\s*(\w+)\(\)", text, re.M))
            if name == "Makefile":
                text = "\n".join(line.lstrip("\t@") for line in text.splitlines() if line.startswith("\t"))
            for word in set(shell_commands(text)) - SHELL_WORDS - functions:
                yield "command", word, name
            for module in {*re.findall(r"python\S*\"?\)? -m (\w+)", text), *re.findall(r"-m (venv)\b", text)
                           } - local:
                yield "module", module, name
        elif name.endswith(".py"):
            for kind, word in set(python_commands_and_modules(path)):
                if kind == "command" or word.split(".")[0] not in local:
                    yield kind, word, name


def module_file(modules):
    """Returns the file of each module as Debian's Python finds it, or None."""
    program = """
import importlib.util, sys
sys.path = [p for p in sys.path if p.startswith("/usr/lib/python3")]
for name in sys.argv[1:]:
    top = name.split(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if top == "venv":  # which needs ensurepip to make one
        spec = importlib.util.find_spec("ensurepip")
    origin = getattr(spec, "origin", None)
    if spec and origin in (None, "built-in", "frozen"):
        origin = (spec.submodule_search_locations or ["built-in"])[0]
    print(name, origin, sep="\\t")
"""
    lines = subprocess.run(["/usr/bin/python3", "-I", "-c", program, *modules], check=True,
                           capture_output=True, text=True).stdout
    return dict(line.split("\t") for line in lines.splitlines())


class Uses:
    """The files outside the tree that the build, the scripts and the tests use.

    Args:
        demo: only the build and the files of `make demo`.

    Attributes:
        found: (kind, file or None if it is not installed, name, user) of each.
    """

    def __init__(self, root, build, demo):
        self.demo, self.found = demo, []
        self.add_build(root, build)
        self.add_sources(root)

    def add_build(self, root, build):
        """Adds the headers and libraries that a build has read."""
        cache = (build / "CMakeCache.txt").read_text()
        toolkits = [pathlib.Path(found).resolve().parents[0 if nccl else 1] for nccl, found in re.findall(
            r"^(?:(NCCL_INCLUDE_DIR|NCCL_LIBRARY)|CMAKE_CUDA_COMPILER):\w+=(/\S+)", cache, re.M)]
        # Debian does not have the CUDA toolkit and NCCL. Without them the build omits the CUDA side.
        outside = [root, build, *(f for f in toolkits if str(f) not in ("/usr", "/usr/include"))]
        users = {}
        for name, user in build_files(build, DEMO_TARGET if self.demo else None):
            users.setdefault(name, user)
        for name, user in users.items():
            path = pathlib.Path(name)
            real = path.resolve()
            if not path.is_absolute() or any(folder in (*path.parents, *real.parents) for folder in outside):
                continue
            nvidias = re.search(r"/(nccl\w*\.h|nccl_device/.*|libnccl\S*|libcuda\.so\S*)$", name)
            if real.exists() and not nvidias:
                library = ".so" in path.name or path.suffix == ".a"
                self.found.append(("library" if library else "header", name, name, user))

    def add_sources(self, root):
        """Adds the commands and Python modules that scripts, tests and benches name."""
        modules = {}
        for kind, name, user in uses(root):
            if self.demo and not DEMO_FILES.fullmatch(user):
                continue
            if kind == "module":
                if name.split(".")[0] not in OPTIONAL_MODULES:
                    modules.setdefault(name, user)
            elif name not in OPTIONAL_COMMANDS:
                found = [folder + name for folder in TOOL_FOLDERS if pathlib.Path(folder + name).exists()]
                if found:
                    self.found.append(("command", found[0], name, user))
        for name, path in module_file(sorted(modules)).items():
            if path != "built-in":
                self.found.append(("module", None if path == "None" else path, name, modules[name]))

    def lacking(self, packages, setup, listed):
        """Returns a text about what no package of `listed`, its dependencies or the base system owns."""
        allowed, missing = packages.closure([*listed, *packages.base]), collections.defaultdict(set)
        for kind, path, name, user in self.found:
            owners = packages.owner.get(merged(path), set()) | packages.owner.get(
                merged(pathlib.Path(path).resolve()), set()) if path else {"a package that is not installed"}
            if not owners & allowed:
                missing[", ".join(sorted(owners)) or "an unknown package"].add(
                    f"{kind} {name}, used by {user}")
        text = ""
        for name, users in sorted(missing.items()):
            text += f"the list of scripts/{setup} lacks {name}, which is needed:\n"
            text += "".join(f"  {user}\n" for user in sorted(users)[:5])
            text += f"  and {len(users) - 5} more\n" if len(users) > 5 else ""
        return text


def containers(root):
    """Returns what is wrong with the files that start from a bare system, and with setup.sh on other systems."""
    docker, made, workflow, makefile = ((root / name).read_text() for name in (
        "Dockerfile", ".devcontainer/devcontainer.json", ".github/workflows/ci.yml", "Makefile"))
    listed = {*setup_list(root, ("required", "demo", "tests"))}
    shown = subprocess.run(["/bin/bash", root / "scripts/setup.sh"], env={"PATH": "/nowhere"},
                           capture_output=True, text=True).stdout  # as on a system without dpkg
    wrong = [f"without dpkg, scripts/setup.sh does not name {name}" for name in listed - {*shown.split()}]
    if not re.search(r'(?s)AS (\w+)\nCOPY scripts/setup\.sh (\S+)\nRUN \2\b.*"target": "\1"', docker + made):
        wrong.append("the stage of .devcontainer in the Dockerfile does not copy scripts/setup.sh and run it")
    known = listed.union(re.findall(r"^([a-z-]+):", makefile, re.M))
    words = re.findall(r"(?:install -y|\bmake(?: -C \S+)?) ([a-z -]+)", docker + made + workflow)
    return "\n".join(wrong + [f"neither scripts/setup.sh nor Makefile has {name}, which a container uses"
                              for name in {*" ".join(words).split()} - known])


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: check_packages.py ROOT BUILD")
    root, build = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])
    if not pathlib.Path("/var/lib/dpkg/info").is_dir():
        print("skipped: not a Debian system")
        sys.exit(77)
    wrong = containers(root)
    print(wrong or "the container and the workflow install packages of scripts/setup.sh")
    packages, failed, without = Packages(), bool(wrong), dict.fromkeys(PLANTED, "")
    for setup, lists in (("setup.sh", ("required", "demo", "tests")),
                         ("setup.sh demo", ("required", "demo"))):
        found, listed = Uses(root, build, demo="demo" in setup), setup_list(root, lists)
        counts = collections.Counter(kind for kind, *_ in found.found)
        wrong = found.lacking(packages, setup, listed)
        if min(counts[kind] for kind in PLURALS) == 0:
            wrong += f"nothing was checked of one kind: {dict(counts)}; is {build} a finished build?\n"
        failed = failed or bool(wrong)
        print(wrong.rstrip() or ", ".join(f"{n} {PLURALS[kind]}" for kind, n in sorted(counts.items())) +
              f" belong to the packages of {setup}'s list and the base system")
        for package in PLANTED:
            without[package] += found.lacking(packages, setup, [p for p in listed if p != package])
    if failed:
        sys.exit(1)
    for package, named in PLANTED.items():
        if named not in without[package]:
            sys.exit(f"without {package} in the list, the check should name '{named}':\n{without[package]}")
    print(f"each of {len(PLANTED)} packages taken from the list is noticed")


if __name__ == "__main__":
    main()
