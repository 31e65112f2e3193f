#!/usr/bin/env python3
"""Tests what is published: the version, the source archive, and the package under each version of Python."""
import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "integrations" / "python"
BUILD_SDIST = "import sys, build_backend; print(build_backend.build_sdist(sys.argv[1]))"
# Imports every module, with stand-ins for the frameworks, so that all code at module level runs.
IMPORT_ALL = """
import importlib.machinery, pathlib, sys, types, unittest.mock
import gradwire
class Anything:
    def __init__(self, *_, **__):
        pass
    def __getattr__(self, name):
        return unittest.mock.MagicMock()
class Framework(types.ModuleType):
    __version__, __path__ = "2.15.0", []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {}) if name[0].isupper() else unittest.mock.MagicMock()
class Frameworks:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("torch", "jax", "numpy", "optax", "lightning", "transformers"):
            return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        return Framework(spec.name)
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Frameworks())
for path in sorted(pathlib.Path(gradwire.__file__).parent.glob("*.py")):
    importlib.import_module("gradwire." + path.stem)
"""


def tracked(*folders: str) -> "set[str]":
    return set(subprocess.run(["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True,
                              text=True).stdout.split())


def published_versions() -> "list[int]":
    """Returns the minor versions of Python 3 in the classifiers."""
    return [int(n) for n in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"',
                                       (PACKAGE / "pyproject.toml").read_text())]


def interpreter(minor: int) -> "str | None":
    """Returns a Python 3.`minor` that runs, on PATH or of pyenv; or None."""
    pyenv = pathlib.Path("~/.pyenv/versions").expanduser()
    for program in (shutil.which(f"python3.{minor}"), *sorted(pyenv.glob(f"3.{minor}.*/bin/python"))):
        if program and subprocess.run([program, "--version"], capture_output=True).returncode == 0:
            return str(program)
    return None


class Archive(unittest.TestCase):
    def sdist(self, source: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
        """Builds the source archive of `source` in `folder` and returns the unpacked archive."""
        done = subprocess.run([sys.executable, "-c", BUILD_SDIST, folder], cwd=source, capture_output=True,
                              text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        name = done.stdout.split()[-1]
        with tarfile.open(folder / name) as archive:
            archive.extractall(folder)
        return folder / name[:-len(".tar.gz")]

    def test_contains_the_librarys_sources_and_reproduces_itself(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            first, second = pathlib.Path(folder, "first"), pathlib.Path(folder, "second")
            first.mkdir()
            second.mkdir()
            tree = self.sdist(PACKAGE, first)
            files = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
            library = tracked("CMakeLists.txt", "LICENSE", "cmake", "include", "runtime", "kernels",
                              "collectives")
            self.assertGreater(len(library), 200)
            expected = {name[len("integrations/python/"):] for name in tracked("integrations/python")}
            expected |= {f"source/{name}" for name in library}
            self.assertEqual(expected - files, set())
            again = self.sdist(tree, second)
            copy = {path.relative_to(again).as_posix() for path in again.rglob("*") if path.is_file()}
            self.assertEqual(files, copy)

    def test_the_projects_addresses_are_in_one_place(self) -> None:
        found = subprocess.run(["git", "grep", "-lF", "https://gradwire" + ".example"], cwd=ROOT,
                               capture_output=True, text=True)
        self.assertEqual(found.stdout.split(), ["integrations/python/pyproject.toml"])

    def test_the_packages_license_is_the_projects(self) -> None:
        self.assertEqual((PACKAGE / "LICENSE").read_bytes(), (ROOT / "LICENSE").read_bytes())


class Version(unittest.TestCase):
    def test_every_version_is_the_headers(self) -> None:
        header = (ROOT / "include" / "gradwire" / "gradwire.h").read_text()
        version = ".".join(re.findall(r"#define GW_VERSION_\w+ (\d+)", header))
        self.assertRegex(version, r"^\d+\.\d+\.\d+$")
        found = {"CHANGELOG.md": re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[:1]}
        found["CITATION.cff"] = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
        for name in tracked("docs/*.md", "README.md", "integrations", "scripts", "cmake"):
            if not name.startswith("docs/results/"):
                text = (ROOT / name).read_text(errors="replace")
                found[name] = re.findall(r"gradwire[-_](\d+\.\d+\.\d+)\b", text)
                found[name] += [f"{short}.{version.split('.')[2]}"
                                for short in re.findall(r"find_package\(gradwire (\d+\.\d+) ", text)]
        different = {name: texts for name, texts in found.items() if any(t != version for t in texts)}
        self.assertEqual(different, {}, f"gradwire.h has {version}")
        self.assertGreaterEqual(sum(map(len, found.values())), 4)


class PythonVersions(unittest.TestCase):
    def test_the_syntax_is_that_of_the_oldest_version(self) -> None:
        project = (PACKAGE / "pyproject.toml").read_text()
        oldest = int(re.search(r'requires-python = ">=3\.(\d+)"', project)[1])
        self.assertEqual(oldest, min(published_versions()))
        for path in PACKAGE.rglob("*.py"):
            ast.parse(path.read_text(), str(path), feature_version=(3, oldest))

    def test_every_installed_version_imports_the_package_and_averages(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "PYTHONDONTWRITEBYTECODE": "1"}
        ran = []
        for minor in published_versions():
            python = interpreter(minor)
            if python is None:
                continue
            for command in (["-c", IMPORT_ALL], ["-m", "gradwire.doctor"]):
                done = subprocess.run([python, *command], env=environment, capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, f"Python 3.{minor}\n{done.stdout}{done.stderr}")
            self.assertIn("the mean is right", done.stdout)
            ran.append(f"3.{minor}")
        print("ran under Python", ", ".join(ran) or "no version")
        self.assertTrue(ran)


if __name__ == "__main__":
    unittest.main(verbosity=2)
