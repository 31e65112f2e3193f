#!/usr/bin/env python3
"""Tests make check: the gates of a file, and the files of a tree with and without git.

check_test.py ROOT
"""
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path()  # argument of the command line


class Check(unittest.TestCase):
    def check(self, file):
        return subprocess.run([sys.executable, "-B", "tools/checks/check.py", file], text=True, cwd=ROOT,
                              capture_output=True)

    def test_runs_the_gates_of_the_file_only(self):
        names = re.findall(r"^([\w.]+): ", self.check("docs/plan.md").stdout, re.M)
        self.assertLessEqual({"text", "paths", "commands"}, set(names))
        self.assertFalse({"kernel_table", "layers", "oracle_wire"} & set(names))
        self.assertIn("nowhere/x: no such file", self.check("nowhere/x").stderr)

    def test_a_tree_without_git_omits_what_gitignore_names(self):
        import gate
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for path in ("a.txt", "build/x.py", "python/build/x.json", "__pycache__/a.pyc", "run.3"):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text("x")
            (folder / ".gitignore").write_text("# a.txt\n/build/\n/python/build/\n__pycache__/\n/run*\n")
            self.assertEqual(gate.files(folder), [".gitignore", "a.txt"])


if __name__ == "__main__":
    ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
    sys.path.insert(0, str(ROOT / "tools/checks"))
    sys.dont_write_bytecode = True
    unittest.main()
