"""What the checks of this folder share: the files of a tree, and the end of a check."""
from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Iterable


def files(root: pathlib.Path, least: int = 0) -> list[str]:
    """Returns the files that git has or would add; without .git, non-empty files that .gitignore does not name.

    Exits if there are fewer than `least`.
    """
    def git(*words: str) -> list[str]:
        return subprocess.run(["git", "-C", root, *words, "--exclude-standard"], capture_output=True,
                              text=True).stdout.splitlines()

    names = git("ls-files", "--cached", "--others") or git("grep", "--no-color", "--no-index", "-le", "")
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
