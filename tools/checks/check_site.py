#!/usr/bin/env python3
"""Fails unless the navigation of mkdocs.yml lists every page of the site exactly once.

    check_site.py ROOT

The pages are those of docs/ and those that scripts/docs_hooks.py adds.
"""
import collections
import pathlib
import re
import sys


def main() -> int:
    root = pathlib.Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(root / "scripts"))
    sys.dont_write_bytecode = True
    import docs_hooks

    pages = {path.relative_to(root / "docs").as_posix() for path in (root / "docs").rglob("*.md")}
    pages |= set(docs_hooks.PAGES)
    navigation = (root / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = collections.Counter(re.findall(r": (\S+\.md)$", navigation, re.M))
    wrong = [f"mkdocs.yml: the navigation lacks {page}: add it" for page in sorted(pages - set(listed))]
    wrong += [f"mkdocs.yml: no page is named {page}: remove it" for page in sorted(set(listed) - pages)]
    wrong += [f"mkdocs.yml: {page} is listed {count} times" for page, count in listed.items() if count > 1]
    print("\n".join(wrong) or f"the navigation lists each of {len(pages)} pages once")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
