"""Helpers for the tests of the real `gradwire` command: a temporary folder, a clean environment, small
inputs."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                      "PMI_RANK", "PMI_SIZE", "GRADWIRE_DATA", "GRADWIRE_SECRET", "GRADWIRE_SECRET_FILE",
                      "GRADWIRE_INSECURE", "GRADWIRE_PORTS", "GRADWIRE_INTERFACE", "COLUMNS")
SMALL = ["--device", "host", "--width", "16", "--depth", "1", "--heads", "2", "--mlp", "32"]
SYNTHETIC = ["--data", "synthetic:256", "--batch-size", "16", "--log-every", "1", *SMALL]


def synthetic(*extra):
    """Returns SYNTHETIC plus `extra` flags. An extra flag replaces a flag of the same name, since the command
    rejects a repeated flag."""
    extra = [str(word) for word in extra]
    kept = [
        word for i in range(0, len(SYNTHETIC), 2) if SYNTHETIC[i] not in extra for word in SYNTHETIC[i:i + 2]]
    return kept + extra


def as_user(user, folder, top, groups=()):
    """Returns the words of a command that runs a program below `top` as another user: as_user(...) + [the
    program's path below `top`, arguments...]. Needs root.

    The program's own path may be closed to that user, like that of a clone in /root. So `top` is mounted at
    `folder`/top, in a mount namespace that ends with the program; `folder` must be open to the user.
    """
    (pathlib.Path(folder) / "top").mkdir(exist_ok=True)
    groups = "--groups " + ",".join(map(str, groups)) if groups else "--clear-groups"
    return ["unshare", "-m", "sh", "-ec", f'mount --bind "{top}" "{folder}/top"; program=$1; shift; '
            f'exec setpriv --reuid {user} --regid {user} {groups} "{folder}/top/$program" "$@"', "sh"]


class CommandTest(unittest.TestCase):
    program = ""  # path of the executable, set by main()
    name = "gradwire"  # prefix of the command's messages
    maxDiff = 2000

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-cli-"))
        self.addCleanup(shutil.rmtree, self.folder)

    @staticmethod
    def environment(more=None):
        clean = {k: v for k, v in os.environ.items()
                 if k not in LAUNCHER_VARIABLES and not k.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_"))}
        clean.update(more or {})
        return clean

    def run_words(self, *words, env=None, **options):
        """Runs a program in the folder and returns the result. `options` are options of subprocess.run()."""
        return subprocess.run(list(map(str, words)), **{
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": self.folder,
            "env": self.environment(env), "timeout": 240, **options})

    def run_command(self, *arguments, env=None):
        return self.run_words(self.program, *arguments, env=env)

    def succeed(self, *arguments, env=None):
        """Runs the command, which must succeed and write no error. Returns the result."""
        result = self.run_command(*arguments, env=env)
        self.assertEqual((result.returncode, result.stderr), (0, ""), result.stdout[-300:])
        return result

    def spawn(self, *words, env=None, **options):
        """Starts a program in the folder. The program is ended at the end of the test at the latest."""
        process = subprocess.Popen(list(map(str, words)), **{
            "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": self.folder,
            "env": self.environment(env), **options})
        self.addCleanup(lambda: (process.kill(), process.communicate()))
        return process

    def train_until(self, step, *arguments):
        """Starts a run. Returns the process once the run has printed this step."""
        run = self.spawn(self.program, *arguments, stderr=None)
        while f"step {step}/" not in run.stdout.readline():
            self.assertIsNone(run.poll())
        return run

    def start(self, world, *arguments, own=None, own_env=None, folders=None, **env):
        """Starts one process per rank, with a file rendezvous by default.

        Args:
            own: extra arguments by rank.
            own_env: extra variables by rank.
            folders: working folder by rank."""
        if "MASTER_ADDR" not in env and "--rendezvous" not in arguments:
            arguments += ("--rendezvous", f"file://{self.folder}/meeting")
        processes = []
        for rank in range(world):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(world), **env, **(own_env or {}).get(rank, {})}
            processes.append(self.spawn(self.program, *arguments, *(own or {}).get(rank, ()), env=variables,
                                        cwd=folders[rank] if folders else self.folder))
        return processes

    def ends(self, processes, code=0, *parts):
        """Waits for the processes. Returns the output and the errors of each.

        Each must end with this code, and with every part in its errors; with code 0 without errors.
        """
        ends = [process.communicate(timeout=240) for process in processes]
        for process, (out, error) in zip(processes, ends):
            self.assertEqual(process.returncode, code, f"{process.args}: {out[-300:]} {error[-600:]}")
            self.assertTrue(error == "" or code != 0, error)
            for part in parts:
                self.assertIn(part, error)
        return ends

    def records(self, name="run.jsonl"):
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def files(self):
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())

    def assert_refused(self, result, *parts):
        """Expects exit code 2, exactly one line on stderr that contains every part, and no sign of a
        crash."""
        self.assertEqual(result.returncode, 2,
                         f"{result.args}: {result.stdout[-300:]} {result.stderr[-300:]}")
        lines = result.stderr.splitlines()
        self.assertEqual(len(lines), 1, result.stderr)
        self.assertTrue(lines[0].startswith(f"{self.name}: "), lines[0])
        for part in parts:
            self.assertIn(str(part), lines[0])


def main():
    """Runs the tests of the calling script: PATH_OF_GRADWIRE [unittest arguments]."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} PATH_OF_GRADWIRE [unittest arguments]")
    CommandTest.program = os.path.abspath(sys.argv.pop(1))
    unittest.main()
