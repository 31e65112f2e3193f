#!/usr/bin/env python3
"""Tests file systems that lack a call, by a library that makes the call fail (tests/resources/refuse.c).

usage: file_systems_test.py GRADWIRE REFUSE_SO"""
import errno
import json
import os
import pathlib
import sys
import tempfile
import unittest

from command import CommandTest, as_user, main, synthetic

LIBRARY = os.path.abspath(sys.argv.pop(2))
LACKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL)
FAILS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
TRAIN = ["train", *synthetic("--steps", 4, "--eval-every", 0)]
CHECKPOINT = [*TRAIN, "--checkpoint", "saved", "--checkpoint-every", 2]


class FileSystems(CommandTest):
    def results(self, calls, errors, *arguments):
        """Yields each call and error, and the command's result in a folder with old.json, a hard link."""
        for call in calls:
            for error in errors:
                self.folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder.parent))
                (self.folder / "old.json").write_text("old")
                os.link(self.folder / "old.json", self.folder / "link.json")
                lacks = {"LD_PRELOAD": LIBRARY, "GRADWIRE_LACKS": f"{call}:{error}:{self.folder}"}
                with self.subTest(call=call, error=errno.errorcode[error], arguments=arguments):
                    yield os.strerror(error), self.run_command(*arguments, env=lacks)

    def test_results_are_written_in_place_without_rename_or_ftruncate(self):
        for name in ("new.json", "old.json"):
            command = [*TRAIN, "--trace", name, "--log", "run.jsonl"]
            for _, result in self.results(("rename", "ftruncate"), LACKS, *command):
                self.assertEqual((result.returncode, result.stderr), (0, ""))
                self.assertIn("traceEvents", json.loads((self.folder / name).read_text()))
                self.assertEqual(self.records()[-1]["type"], "summary")
        for why, result in self.results(["rename"], FAILS, *TRAIN, "--trace", "new.json"):
            self.assertEqual((result.returncode, why in result.stderr), (1, True))

    def test_checkpoints_are_refused_before_training_without_rename_or_ftruncate(self):
        for call, what in (("rename", "rename folders"), ("ftruncate", "set the size of a file")):
            for why, result in self.results([call], LACKS + FAILS, *CHECKPOINT):
                self.assert_refused(result, "--checkpoint", f"cannot {what}: {why}")
                self.assertEqual(list((self.folder / "saved").iterdir()), [])

    def test_fsync_may_be_missing_but_not_fail(self):
        calls = ("fsync", "fsync_folder")
        for _, result in self.results(calls, (*LACKS, errno.EBADF, errno.EACCES, errno.EISDIR), *CHECKPOINT):
            self.assertEqual((result.returncode, result.stderr), (0, ""))
        for why, result in self.results(calls, FAILS, *CHECKPOINT):
            self.assertEqual((result.returncode, why in result.stderr), (1, True))

    def test_ranks_meet_at_a_file_without_rename(self):
        for rank in self.start(2, *TRAIN, LD_PRELOAD=LIBRARY, GRADWIRE_LACKS=f"rename:38:{self.folder}"):
            self.assertEqual((rank.communicate(timeout=60)[1], rank.returncode), ("", 0))

    @unittest.skipUnless(os.getuid() == 0, "needs root, to be another user")
    def test_a_folder_that_cannot_be_listed_is_refused_by_flag(self):
        self.folder.chmod(0o755)
        (self.folder / "saved").mkdir()
        (self.folder / "saved").chmod(0o733)
        words = as_user(12345, self.folder, pathlib.Path(self.program).parent.parent)
        result = self.run_words(*words, "bin/gradwire", *CHECKPOINT)
        self.assert_refused(result, "--checkpoint saved", "cannot be listed: Permission denied")


if __name__ == "__main__":
    main()
