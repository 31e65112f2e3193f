#!/usr/bin/env python3
"""Passes a FIFO, a device and a folder to every flag and variable that names an input file. The command names
the kind of file and never waits for a writer."""
import os
import pathlib
import shutil
import stat

import targets
from command import CommandTest, SYNTHETIC, main

QUICK = [*SYNTHETIC, "--eval-every", "0", "--steps", "3"]
RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def fifo(path):
    os.mkfifo(path)


def device(path):
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which has no end


def folder(path):
    path.mkdir()


KINDS = {"a FIFO": fifo, "a device": device, "a folder": folder}


class Inputs(CommandTest):
    def setUp(self):
        super().setUp()
        self.run_command("train", *QUICK, "--checkpoint", "saved", "--checkpoint-every", 2, "--log",
                         "first.jsonl")

    def kinds(self):
        for kind, make in KINDS.items():
            if kind != "a device" or os.getuid() == 0:
                yield kind, make

    def run_within(self, seconds, *arguments, program=None, **env):
        """Runs a command with a time limit. A command that waits for a writer exceeds the limit."""
        return self.run_words(program or self.program, *arguments, env=env, timeout=seconds)

    def test_named_files(self):
        """Covers the flags and the variable that name a file."""
        calls = {"--init": (["train", *QUICK, "--init"], {}),
                 "--join": (["train", *QUICK, "--elastic", "1:2", "--join"], {}),
                 "top": (["top"], {}),
                 "GRADWIRE_SECRET_FILE": (["train", *QUICK], RANK)}
        for name, (words, env) in calls.items():
            for kind, make in self.kinds():
                with self.subTest(name, kind=kind):
                    path = self.folder / f"{name}-{kind}".replace(" ", "-").lstrip("-")
                    make(path)
                    if name.startswith("GRADWIRE"):
                        result = self.run_within(20, *words, **env, **{name: str(path)})
                    else:
                        result = self.run_within(20, *words, path)
                    self.assert_refused(result, path, "not a ")

    def test_rendezvous_file(self):
        for kind, make in self.kinds():
            for rank in "01":
                with self.subTest(kind=kind, rank=rank):
                    path = self.folder / f"{kind}-{rank}".replace(" ", "-")
                    make(path)
                    result = self.run_within(20, "train", *QUICK, "--rendezvous", f"file://{path}",
                                             "--timeout-s", 15, RANK=rank, WORLD_SIZE="2")
                    self.assert_refused(result, path, kind)
                    self.assertFalse(stat.S_ISREG(path.lstat().st_mode))

    def test_rendezvous_and_members_behind_links_and_mounts(self):
        """Expects the link and the mount to be kept. At the end of the run, the file is deleted, or empty if
        the file cannot be deleted."""
        flags = [
            "train", *QUICK, "--elastic", "1:2", "--rendezvous", "file://meeting", "--members", "members"]
        flags[flags.index("file://meeting")] = f"file://{self.folder}/meeting"
        setups = {"links": "ln -s inner/m1 meeting; ln -s inner/m2 members; mkdir inner"}
        if targets.may_mount():
            setups["mounts"] = "touch m1 m2 meeting members; mount --bind m1 meeting; mount --bind m2 members"
        for name, setup in setups.items():
            with self.subTest(name):
                script = (
                    f'{setup}; for r in 0 1; do RANK=$r WORLD_SIZE=2 "$@" & p="$p $!"; done; for p in $p; do'
                    " wait $p; done")
                words = ["unshare", "-m"] if name == "mounts" else []
                place = self.folder / name
                place.mkdir()
                here = [w.replace(str(self.folder), str(place)) for w in flags]
                result = self.run_words(*words, "bash", "-ec", script, "bash", self.program, *here, cwd=place,
                                        timeout=60)
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual(result.stderr, "")
                left = sorted(str(p.relative_to(place)) for p in place.rglob("*"))
                self.assertEqual(left, ["inner", "meeting", "members"]
                                 if name == "links" else ["m1", "m2", "meeting", "members"])
                if name == "links":
                    self.assertEqual(os.readlink(place / "members"), "inner/m2")
                else:
                    self.assertEqual({p.stat().st_size for p in place.iterdir()}, {0})

    def test_members_must_be_a_regular_file(self):
        for kind, make in self.kinds():
            with self.subTest(kind):
                path = self.folder / kind.replace(" ", "-")
                make(path)
                result = self.run_within(20, "train", *QUICK, "--elastic", "1:2", "--members", path,
                                         "--rendezvous", f"file://{self.folder}/meeting", RANK="0",
                                         WORLD_SIZE="2")
                self.assert_refused(result, path, kind)

    def test_files_of_a_checkpoint(self):
        for file in ("model.safetensors", "state-0-of-1.safetensors"):
            for kind, make in self.kinds():
                with self.subTest(file, kind=kind):
                    shutil.rmtree(self.folder / "again", ignore_errors=True)
                    shutil.copytree(self.folder / "saved" / "step-000000002", self.folder / "again")
                    (self.folder / "again" / file).unlink()
                    make(self.folder / "again" / file)
                    self.assert_refused(self.run_within(20, "train", *QUICK, "--resume", "again"), "again")

    def test_files_of_data(self):
        for kind, make in self.kinds():
            with self.subTest(kind):
                data = self.folder / kind.replace(" ", "-")
                data.mkdir()
                make(data / "train-images-idx3-ubyte.gz")
                self.assert_refused(self.run_within(20, "train", "--data", f"fashion-mnist:{data}"),
                                    "train-images-idx3-ubyte.gz", "not a regular file")

    def test_gradients_of_bench(self):
        for kind, make in self.kinds():
            with self.subTest(kind):
                place = self.folder / kind.replace(" ", "-")
                place.mkdir()
                make(place / "g.safetensors")
                result = self.run_within(20, "formats", "--gradients", place,
                                         program=pathlib.Path(self.program).parent / "gradwire-bench")
                self.assertEqual(result.returncode, 2, result.stderr)

    def test_logs_of_a_comparison(self):
        """Expects a number to be skipped if its log is a FIFO, both when reading earlier runs and when
        writing."""
        os.mkfifo(self.folder / "c.0.jsonl")
        words = ["compare", *QUICK, "--compression", "fp32", "--json", "c.json"]
        for _ in range(2):
            result = self.run_within(60, *words)
            self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("already done", result.stdout)
        self.assertTrue((self.folder / "c.1.jsonl").is_file())


if __name__ == "__main__":
    main()
