#!/usr/bin/env python3
"""Runs every example of a page as printed, by ranks that then train with it.

    page_examples.py PAGE [FOLDER]    PAGE: one of PAGES; FOLDER: a build folder, for pages that need programs

A session runs some of a page's examples in one set of ranks. It defines the names that an example expects
from the reader, such as a model, a rank or an address. The test fails for an example that belongs to no
session and is not in NOT_RUN, which gives the reason why an example does not run.
"""
from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from typing import Dict, List, Set, Tuple

import launch
from page_commands import blocks_of
from page_sessions import Session

# The page, and the module with its SESSIONS and NOT_RUN.
PAGES = {
    "for-pytorch": ("docs/for-pytorch.md", "page_pytorch"),
    "for-fsdp": ("docs/for-fsdp.md", "page_fsdp"),
    "for-jax": ("docs/for-jax.md", "page_jax"),
    "for-trainers": ("docs/for-trainers.md", "page_trainers"),
    "extending": ("docs/extending.md", "page_extending"),
}


def examples(page: str) -> List[str]:
    """Returns the page's indented and fenced blocks, without its commands, which page_commands.py runs."""
    return ["\n".join(block.lines).rstrip() for block in blocks_of(page) if not block.of_commands]


def find(first: str, all_examples: List[str]) -> str:
    """Returns the example that begins with `first`."""
    matching = [e for e in all_examples if e.startswith(first)]
    if len(matching) != 1:
        raise SystemExit(f"{len(matching)} examples begin with {first!r}, expected 1: update the sessions")
    return matching[0]


def run_rank(module: str, name: str, rank: int, world: int, texts: List[str], folder: str,
             address: str) -> int:
    """Runs a session on this rank. Returns the exit code."""
    session: Session = launch.import_for_rank(module, rank, world).SESSIONS[name]
    os.chdir(folder)
    session.run(texts, address)
    return 0


def main() -> int:
    os.environ.update(OMP_NUM_THREADS="1", GRADWIRE_THREADS="1")
    page = sys.argv[1]
    path, module = PAGES[page]
    loaded = importlib.import_module(module)
    for framework in getattr(loaded, "PRELOAD", []):
        importlib.import_module(framework)  # once for the ranks of all sessions
    sessions: Dict[str, Session] = loaded.SESSIONS
    not_run: List[Tuple[str, str]] = loaded.NOT_RUN
    printed = examples(path)
    taken = [find(first, printed) for session in sessions.values() for first in session.examples]
    reasons = {find(first, printed): reason for first, reason in not_run}
    failures = [f"neither run nor in NOT_RUN: {e}" for e in printed if e not in taken and e not in reasons]
    failures += [f"both run and in NOT_RUN: {e}" for e in reasons if e in taken]
    ran: Set[str] = set()
    folder = tempfile.mkdtemp()
    # Sessions in this process last: the ranks of others are its forks, which must not have Ray's threads.
    for name, session in sorted(sessions.items(), key=lambda item: item[1].world == 0):
        texts = [find(first, printed) for first in session.examples]
        if session.missing():
            print(f"{page}, {name}: NOT RUN HERE: {session.missing()}", flush=True)
        elif session.world == 0:
            session.run(texts, *sys.argv[2:])
            ran.update(texts)
        else:
            address = f"127.0.0.1:{launch.free_port()}"
            codes = launch.fork_ranks(session.world, lambda rank: run_rank(
                module, name, rank, session.world, texts, folder, address), 200)
            failures += [f"{name}: the ranks ended with {codes}"] if any(codes) else []
            ran.update(texts)
    shutil.rmtree(folder)
    for example, reason in reasons.items():
        print(f"{page}: not run: {example.splitlines()[0]}\n    {reason}")
    print(
        f"{page}: {len(printed)} examples, {len(ran)} run as printed, {len(reasons)} not run for the reasons"
        " above")
    print("\n".join(f"FAILED: {failure}" for failure in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
