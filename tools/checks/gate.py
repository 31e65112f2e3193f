"""What the checks of this folder share: the files of a tree, and the end of a check."""
from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Iterable


def files(root: pathlib.Path, least: int = 0) -> list[str]:
    """Returns the names of the files that git has or would add; without git, those outside of build folders.

    Exits if there are fewer than `least`.
    """
    listed = subprocess.run(["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"],
                            capture_output=True, text=True)
    names = listed.stdout.splitlines() if listed.returncode == 0 else [
        p.relative_to(root).as_posix() for p in root.rglob("*") if "__pycache__" not in p.parts
        and not p.relative_to(root).parts[0].startswith(("build", "dist"))]
    found = sorted(name for name in set(names) if (root / name).is_file())
    if len(found) < least:
        sys.exit(f"{pathlib.Path(sys.argv[0]).stem}: only {len(found)} files below {root.resolve()}: wrong "
                 "folder?")
    return found


def end(wrong: Iterable[str], fine: str) -> int:
    """Prints what is wrong, or else `fine`. Returns the exit status."""
    found = list(wrong)
    print("\n".join(found) or fine)
    return int(bool(found))
