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
KIND = "a KIND"
# The name of a file, a command and variables that name it (@) or its folder (#), and parts of the message.
INPUTS = [
    ("file", ["train", *QUICK, "--init", "@"], {}, ["@", "not a "]),
    ("file", ["train", *QUICK, "--elastic", "1:2", "--join", "@"], {}, ["@", "not a "]),
    ("file", ["top", "@"], {}, ["@", "not a "]),
    ("file", ["train", *QUICK], {**RANK, "GRADWIRE_SECRET_FILE": "@"}, ["@", "not a "]),
    *(("file", ["train", *QUICK, "--rendezvous", "file://@", "--timeout-s", "15"],
       {"RANK": rank, "WORLD_SIZE": "2"}, ["@", KIND]) for rank in "01"),
    ("file", ["train", *QUICK, "--elastic", "1:2", "--members", "@", "--rendezvous", "file://#/meeting"],
     {"RANK": "0", "WORLD_SIZE": "2"}, ["@", KIND]),
    *((file, ["train", *QUICK, "--resume", "#"], {}, ["#"])
      for file in ("model.safetensors", "state-0-of-1.safetensors")),
    ("train-images-idx3-ubyte.gz", ["train", "--data", "fashion-mnist:#"], {}, ["@", "not a regular file"]),
    ("train_images.npy", ["train", "--data", "arrays:#"], {}, ["@", KIND]),
    ("gradients.safetensors", ["formats", "--gradients", "#"], {}, ["@"])]


class Inputs(CommandTest):
    def test_every_input_names_its_kind_and_no_command_waits_for_a_writer(self):
        self.succeed("train", *QUICK, "--checkpoint", "saved", "--checkpoint-every", 2)
        for number, (file, words, env, parts) in enumerate(INPUTS):
            for kind, make in KINDS.items():
                if kind == "a device" and os.getuid() != 0:
                    continue
                place = self.folder / f"{number}-{make.__name__}"

                def filled(text):
                    return text.replace("@", f"{place}/{file}").replace("#", str(place)).replace(KIND, kind)

                with self.subTest(words, kind=kind):
                    if "--resume" in words:
                        shutil.copytree(self.folder / "saved/step-000000002", place)
                        (place / file).unlink()
                    else:
                        place.mkdir()
                    make(place / file)
                    self.name = "gradwire-bench" if words[0] == "formats" else "gradwire"
                    result = self.run_words(pathlib.Path(self.program).with_name(self.name),
                                            *map(filled, words), timeout=20,
                                            env={name: filled(value) for name, value in env.items()})
                    self.assert_refused(result, *map(filled, parts))
                    self.assertFalse(stat.S_ISREG((place / file).lstat().st_mode))

    def test_rendezvous_and_members_behind_links_and_mounts(self):
        """Expects the link and the mount to be kept. At the end of the run, the file is deleted, or empty if
        the file cannot be deleted."""
        flags = ["train", *QUICK, "--elastic", "1:2", "--rendezvous", f"file://{self.folder}/meeting",
                 "--members", "members"]
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

    def test_logs_of_a_comparison(self):
        """Expects a number to be skipped if its log is a FIFO, both when reading earlier runs and when
        writing."""
        os.mkfifo(self.folder / "c.0.jsonl")
        words = ["compare", *QUICK, "--compression", "fp32", "--json", "c.json"]
        for _ in range(2):
            result = self.run_words(self.program, *words, timeout=60)
            self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("already done", result.stdout)
        self.assertTrue((self.folder / "c.1.jsonl").is_file())


if __name__ == "__main__":
    main()
