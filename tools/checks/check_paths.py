#!/usr/bin/env python3
"""Fails when a comment, doc or script names a file or folder that does not exist, or a doc has a dead link.

    check_paths.py ROOT

Reads every text file. A path is a word that begins with one of the top folders. In a path * means any text
and {h,cpp} one of several texts; a path without an extension means all files that begin with it. A file named
without its folder (measure.h) must exist in some folder.
"""
import fnmatch
import pathlib
import re
import sys

import gate

SUFFIXES = {
    ".h", ".cpp", ".c", ".cu", ".cuh", ".py", ".sh", ".md", ".cmake", ".txt", ".toml", ".in", ".json",
    ".jsonl", ".map", ""
}
ENDINGS = r"(?:h|hpp|c|cc|cpp|cu|cuh|py|sh|md|cmake|png|in)"
BARE = re.compile(rf"(?<![\w./<>*-])[A-Za-z]\w*(?:/\w+)*\.{ENDINGS}\b(?![\w(/]|\.\w)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Names of files outside the tree: headers and scripts of other projects, and files of users.
ELSEWHERE = {"nccl.h", "cuda_runtime.h", "cupti.h", "asan_interface_internal.h", "train.py", "result.png",
             "build/demo/report.png", "cublasLt.h"}


def comment_of(name, line):
    """Returns the part of a line to check: in a doc the whole line, in code the comment."""
    if name.endswith(".md"):
        return line
    mark = "//" if name.endswith((".h", ".cpp", ".c", ".cu", ".cuh")) else "#"
    return line.partition(mark)[2]


class Tree:
    def __init__(self, root):
        self.root, self.files = root, set(gate.files(root, 200))
        self.folders = {"/".join(f.split("/")[:i]) for f in self.files for i in range(1, f.count("/") + 1)}
        self.tails = {f.split("/", i)[-1] for f in self.files for i in range(f.count("/") + 1)}
        tops = sorted({f.split("/")[0] for f in self.files if "/" in f and not f.startswith(".")})
        tops = [{"tools": "tools/checks", "include": "include/gradwire"}.get(top, top) for top in tops]
        self.path = re.compile(rf"(?<![\w./<$}}{{-])(?:{'|'.join(tops)})/[\w*{{,}}./-]*\w(?:\*|}}|/)?")
        self.headings = {}

    def exists(self, path):
        """Returns whether `path` names a file or folder, or is the beginning of a file's name."""
        if match := re.search(r"{([^{}]*)}", path):
            return all(
                self.exists(path[:match.start()] + part + path[match.end():]) for part in match[1].split(","))
        path = path.rstrip("/")
        if "*" in path:
            return any(fnmatch.fnmatch(f, path) for f in self.files)
        if path in self.files or path in self.folders:
            return True
        ended = "." in path.rpartition("/")[2]
        return not ended and any(f.startswith((path + ".", path + "_")) for f in self.files)

    def anchors(self, name):
        """Returns the link targets of a doc's headings."""
        if name not in self.headings:
            text = re.sub(r"^```.*?^```", "", (self.root / name).read_text(), flags=re.S | re.M)
            titles = re.findall(r"^#+ +(.+?)\s*$", text, re.M)
            self.headings[name] = {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}
        return self.headings[name]

    def broken_link(self, name, target):
        """Returns the reason why a link of a doc is broken; None if the link is valid."""
        if re.match(r"[a-z]+:|\.\./\.\./actions(/|$)", target):  # actions: GitHub's pages of the workflows
            return None
        path, _, anchor = target.partition("#")
        to = name if not path else (self.root / name).parent.joinpath(path).resolve()
        if path:
            try:
                to = to.relative_to(self.root).as_posix()
            except ValueError:
                return f"the link {target} leads out of the repository"
            if to not in self.files and to not in self.folders:
                return f"the link {target} leads to nothing"
        if anchor and to.endswith(".md") and anchor not in self.anchors(to):
            return f"the link {target}: {to} has no such heading"
        return None

    def problems(self):
        for name in sorted(self.files):
            # Records of old runs may name files that have moved, but the records' links must resolve.
            record = name.startswith("docs/results/")
            if pathlib.PurePath(name).suffix not in SUFFIXES or (record and not name.endswith(".md")):
                continue
            try:
                lines = (self.root / name).read_text().splitlines()
            except UnicodeDecodeError:
                continue
            for number, line in enumerate(lines, 1):
                for match in self.path.finditer("" if record else line):
                    if not self.exists(match[0]):
                        yield f"{name}:{number}: {match[0]} does not exist"
                for match in BARE.finditer("" if record else comment_of(name, line)):
                    if match[0] not in self.tails and match[0] not in ELSEWHERE:
                        yield f"{name}:{number}: no folder has a file {match[0]}"
                if name.endswith(".md"):
                    for match in LINK.finditer(line):
                        if why := self.broken_link(name, match[1]):
                            yield f"{name}:{number}: {why}"


def main():
    tree = Tree(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
    return gate.end(tree.problems(), f"{len(tree.files)} files: every path and link leads somewhere")


if __name__ == "__main__":
    sys.exit(main())
