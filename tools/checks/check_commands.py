#!/usr/bin/env python3
"""Fails for a command of README or of a page that no test runs, and for a row of page_commands.py without a
command.

    check_commands.py ROOT

The tests page_commands_* run a page's commands as printed, or as tests/integrations/page_commands.py says.
"""
import collections
import pathlib
import re
import sys

import gate

TABLE = "tests/integrations/page_commands.py"


def problems(table):
    commands, blocks = table.all_commands(), [b for page in table.pages() for b in table.blocks_of(page)]
    for block in blocks:
        place, first = f"{block.page}:{block.line}", next(filter(None, block.lines), "")
        known = block.of_commands or block.language not in table.SHELL or block.page in table.EXAMPLES
        if not known and not first.startswith(table.OTHER):
            yield (f"{place}: no test runs '{first}': if it is a command, add its program to PROGRAMS in "
                   f"{TABLE}; if not, name its language after ```, or add its beginning to OTHER there")
    for command in commands:
        if "..." in command.shorter and not command.reason:
            yield (f"{command.place}: '{command.text}' cannot run with '...': write it out, or add to {TABLE} "
                   "what it stands for (SHORTER) or why the command does not run (NOT_RUN)")
    used = set().union(*(table.shorten(c.text)[1] for c in commands))
    for pattern, _ in table.SHORTER:
        if pattern not in used:
            yield f"{TABLE}: SHORTER: no page has a command with '{pattern}': delete the row"
    for pattern, _ in table.NOT_RUN:
        if not any(re.match(pattern, c.text) for c in commands):
            yield f"{TABLE}: NOT_RUN: no page has a command that begins with '{pattern}': delete the row"


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    sys.path.insert(0, str((root / TABLE).parent))
    import page_commands as table
    ways = collections.Counter(command.way for command in table.all_commands())
    return gate.end(problems(table), f"{sum(ways.values())} commands of README and the pages: tests run "
                    f"{ways['as printed']} as printed and {ways['in a shorter form']} in a shorter form; "
                    f"{ways['not run']} do not run, for the reasons in {TABLE}")


if __name__ == "__main__":
    sys.exit(main())
