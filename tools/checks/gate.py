"""What the checks of this folder share: the files of a tree, and the end of a check."""
from __future__ import annotations

import fnmatch
import pathlib
import subprocess
import sys
from typing import Iterable


def files(root: pathlib.Path, least: int = 0) -> list[str]:
    """Returns the files that git has or would add; without git, the files that .gitignore does not name.

    Exits if there are fewer than `least`.
    """
    listed = subprocess.run(["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else not_ignored(root)
    found = sorted(name for name in set(names) if (root / name).is_file())
    if len(found) < least:
        sys.exit(f"{pathlib.Path(sys.argv[0]).stem}: only {len(found)} files below {root.resolve()}: wrong "
                 "folder?")
    return found


def not_ignored(root: pathlib.Path) -> list[str]:
    """Returns the names of the files for which no line of .gitignore has a pattern."""
    patterns = [line.rstrip("/") for line in (root / ".gitignore").read_text().splitlines()
                if line and not line.startswith("#")]

    def ignored(name: str) -> bool:
        folders = ["/" + name, *("/" + str(p) for p in pathlib.PurePosixPath(name).parents)]
        return any(fnmatch.fnmatchcase(path if pattern.startswith("/") else path.rpartition("/")[2], pattern)
                   for path in folders for pattern in patterns)

    names = (p.relative_to(root).as_posix() for p in root.rglob("*"))
    return [name for name in names if not name.startswith(".git/") and not ignored(name)]


def end(wrong: Iterable[str], fine: str) -> int:
    """Prints what is wrong, or else `fine`. Returns the exit status."""
    found = list(wrong)
    print("\n".join(found) or fine)
    return int(bool(found))
