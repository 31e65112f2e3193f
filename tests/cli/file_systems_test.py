#!/usr/bin/env python3
"""Tests file systems that lack a call, by a library that makes the call fail (tests/resources/file_system.c).

usage: file_systems_test.py GRADWIRE FILE_SYSTEM_SO"""
import errno
import json
import os
import pathlib
import sys
import unittest

from command import CommandTest, as_user, main, synthetic

LIBRARY = os.path.abspath(sys.argv.pop(2))
LACKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL)
FAILS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
TRAIN = ["train", *synthetic("--steps", 4, "--eval-every", 0)]
CHECKPOINT = [*TRAIN, "--checkpoint", "disk/saved", "--checkpoint-every", 2]


class FileSystems(CommandTest):
    def run_on(self, call, error, *arguments, **variables):
        """Runs a command on a fresh folder `disk` that contains old.json, which has a hard link."""
        disk = self.folder / f"disk{len(list(self.folder.iterdir()))}"
        disk.mkdir()
        (disk / "old.json").write_text("old")
        os.link(disk / "old.json", disk / "link.json")
        self.disk = disk
        return self.run_command(*[str(a).replace("disk/", f"{disk}/") for a in arguments], env={
            "LD_PRELOAD": LIBRARY, "GRADWIRE_FILE_SYSTEM": f"{call}:{error}:{disk}", **variables})

    def test_results_are_written_in_place_without_rename_or_ftruncate(self):
        for call in ("rename", "ftruncate", "fchmod"):
            for error in LACKS:
                for name in ("new.json", "old.json"):
                    with self.subTest(call=call, error=errno.errorcode[error], name=name):
                        result = self.run_on(call, error, *TRAIN, "--trace", f"disk/{name}", "--log", "disk/log")
                        self.assertEqual((result.returncode, result.stderr), (0, ""))
                        self.assertTrue(json.loads((self.disk / name).read_text()))
                        self.assertIn('"summary"', (self.disk / "log").read_text().splitlines()[-1])
        for error in FAILS:
            result = self.run_on("rename", error, *TRAIN, "--trace", "disk/new.json")
            self.assertEqual((result.returncode, os.strerror(error) in result.stderr), (1, True))

    def test_checkpoints_are_refused_before_training_without_rename_or_ftruncate(self):
        for call, what in (("rename", "rename folders"), ("ftruncate", "set the size of a file")):
            for error in (*LACKS, *FAILS):
                result = self.run_on(call, error, *CHECKPOINT)
                self.assert_refused(result, "--checkpoint", f"cannot {what}: {os.strerror(error)}")
                self.assertNotIn("step 1/", result.stdout)
                self.assertEqual(list((self.disk / "saved").iterdir()), [])

    def test_fsync_may_be_missing_but_not_fail(self):
        for call in ("fsync", "fsync_folder"):
            for error in (*LACKS, errno.EBADF, errno.EACCES, errno.EISDIR):
                result = self.run_on(call, error, *CHECKPOINT)
                self.assertEqual((result.returncode, result.stderr), (0, ""), (call, error))
            for error in FAILS:
                result = self.run_on(call, error, *CHECKPOINT)
                self.assertEqual((result.returncode, os.strerror(error) in result.stderr), (1, True))

    def test_ranks_meet_at_a_file_without_rename(self):
        for rank in self.start(2, *TRAIN, LD_PRELOAD=LIBRARY,
                               GRADWIRE_FILE_SYSTEM=f"rename:{errno.ENOSYS}:{self.folder}"):
            self.assertEqual(rank.communicate(timeout=60)[1], "")
            self.assertEqual(rank.returncode, 0)

    @unittest.skipUnless(os.getuid() == 0, "needs root, to be another user")
    def test_a_folder_that_cannot_be_listed_is_refused_by_flag(self):
        self.folder.chmod(0o755)
        (self.folder / "saved").mkdir()
        (self.folder / "saved").chmod(0o733)
        program = pathlib.Path(self.program)
        words = as_user(12345, self.folder, program.parent.parent)
        result = self.run_words(*words, "bin/gradwire", *TRAIN, "--checkpoint", "saved")
        self.assert_refused(result, "--checkpoint saved", "cannot be listed: Permission denied")


if __name__ == "__main__":
    main()
