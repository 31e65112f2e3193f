#!/usr/bin/env python3
"""Runs `gradwire` under common limits: ulimit -n, -u, -v and -s.

The command succeeds, or names the limit to raise.

usage: limits_test.py PATH_OF_GRADWIRE [unittest arguments]
"""
import os
import pathlib
import re
import resource
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "cli"), str(HERE.parent / "integrations")]
from command import CommandTest, as_user, main, synthetic  # noqa: E402
from launch import free_port  # noqa: E402

ALL = "GRADWIRE_FULL_SWEEPS" in os.environ
WIDE = ["--width", "512", "--mlp", "2048", "--depth", "2", "--steps", "1", "--eval-every", "0"]


class Limits(CommandTest):
    def begin(self, *arguments, limits=(), env=None, user=None):
        """Starts the command. `limits`: pairs of a resource.RLIMIT_ constant and a value."""
        def limit():
            for which, value in limits:
                resource.setrlimit(which, (value, value))

        path = pathlib.Path(self.program)
        words = [path] if user is None else [*as_user(user, self.folder, path.parents[1]), f"bin/{path.name}"]
        return self.spawn(*words, *arguments, env=env, preexec_fn=limit)

    def ended(self, process, limit_s):
        out, err = process.communicate(timeout=limit_s)
        self.assertIn(process.returncode, (0, 1), f"{process.args}: {out[-500:]} {err[-500:]}")
        return process.returncode, out, err

    def launch(self, rank, world, port):
        return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port)}

    def test_too_few_descriptors_name_the_limit(self):
        for count in range(4, 23) if ALL else (6, 9, 12):
            with self.subTest(descriptors=count):
                process = self.begin("train", *synthetic("--timeout-s", "1"),
                                     env=self.launch(0, 2, free_port()),
                                     limits=[(resource.RLIMIT_NOFILE, count)])
                code, _, err = self.ended(process, 20)
                self.assertEqual(code, 1)
                if count >= 8:  # with fewer descriptors the loader cannot read a file
                    self.assertTrue("ulimit -n" in err or "never came: rank 1" in err, err)

    def test_a_rendezvous_without_descriptors_for_all_ranks_fails_without_spinning(self):
        port = free_port()
        arguments = ["train", *synthetic("--steps", "2", "--timeout-s", "6")]
        others = [self.begin(*arguments, env=self.launch(r, 12, port)) for r in range(1, 12)]
        begin = time.monotonic()
        first = self.begin(*arguments, limits=[(resource.RLIMIT_NOFILE, 16)], env=self.launch(0, 12, port))
        _, err = first.communicate(timeout=40)
        self.assertLess(time.monotonic() - begin, 30)
        self.assertEqual(first.returncode, 1)
        # Joiners that arrive early take the last descriptors before rank 0 has made its own events.
        self.assertRegex(err, r"cannot (accept a connection|make an event): Too many open files; "
                         r"this process may have 16 \(ulimit -n\)")
        # Joiners may reach their deadline while rank 0 has no descriptor for them, and connect again.
        repeats = [int(count) for count in re.findall(r"\((\d+) so far\)", err)]
        self.assertLess(max(repeats, default=0), 50, "rank 0 spins: it accepts and rejects without a pause")
        self.assertLess(len(err.splitlines()), 50, err)
        for other in others:
            self.assertEqual(self.ended(other, 60)[0], 1)

    def test_fewer_threads_than_requested_compute_more_slowly(self):
        if os.geteuid() != 0:
            self.skipTest("limits of threads hold per user: needs root to become another one")
        env = {"GRADWIRE_THREADS": "64"}
        os.chmod(self.folder, 0o777)
        for threads in range(2, 21) if ALL else (4, 8):
            with self.subTest(threads=threads):
                process = self.begin("train", *synthetic("--steps", "2", "--width", "256", "--mlp", "1024"),
                                     limits=[(resource.RLIMIT_NPROC, threads)], env=env, user=43210)
                code, out, err = self.ended(process, 60)
                if code == 0:
                    self.assertIn("2 steps in", out)
                else:
                    self.assertIn("the system refuses more threads", err)
                    self.assertIn(f"{threads} processes and threads of this user (ulimit -u)", err)

    def test_too_little_address_space_names_the_limit(self):
        failed = 0
        for kib in range(860000, 1400000, 12000 if ALL else 90000):
            with self.subTest(kib=kib):
                process = self.begin("train", *synthetic("--ranks", "2", "--timeout-s", "5", *WIDE),
                                     limits=[(resource.RLIMIT_AS, kib * 1024)])
                code, _, err = self.ended(process, 60)
                if code != 0:
                    failed += 1
                    self.assertIn("ulimit -v", err)
        self.assertGreater(failed, 0)

    def test_small_stacks_suffice(self):
        for kib in (128, 256):
            with self.subTest(kib=kib):
                process = self.begin("train", *synthetic("--ranks", "2", "--steps", "2"),
                                     limits=[(resource.RLIMIT_STACK, kib * 1024)])
                self.assertEqual(self.ended(process, 60)[0], 0)


if __name__ == "__main__":
    main()
