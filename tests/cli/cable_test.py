#!/usr/bin/env python3
"""Tests two hosts whose cable is cut. Both sides detect the cut within seconds, long before the deadline of
an operation.

The hosts are network namespaces. The test is skipped if this process must not create namespaces."""
import contextlib
import json
import pathlib
import subprocess
import sys
import time

from command import CommandTest, SYNTHETIC, main

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integrations"))
import hosts_test  # noqa: E402

ADDRESS = {"A": "10.213.77.1", "B": "10.213.77.2"}
GONE_AFTER_S = 10  # kHostGoneAfter of collectives/net/socket.h


class Cable(CommandTest):
    def setUp(self):
        super().setUp()
        hosts = contextlib.ExitStack()
        self.addCleanup(hosts.close)
        try:
            hosts.enter_context(hosts_test.hosts())
            hosts_test.cable({host: f"{address}/24" for host, address in ADDRESS.items()})
        except (OSError, subprocess.CalledProcessError) as error:
            self.skipTest(
                f"this machine does not permit network namespaces: {getattr(error, 'stderr', None) or error}")

    def on(self, host, rank, world, *arguments, **variables):
        variables = {"MASTER_ADDR": ADDRESS["A"], "MASTER_PORT": "29511", "GRADWIRE_SECRET": "a secret",
                     "RANK": str(rank), "WORLD_SIZE": str(world), **variables}
        words = ["ip", "netns", "exec", hosts_test.PREFIX + host, self.program, *arguments]
        return self.spawn(*words, env=variables)

    def cut(self):
        hosts_test.on("B", "link", "set", hosts_test.CABLE, "down")
        return time.monotonic()

    def test_ranks_on_both_sides_detect_it(self):
        flags = ("train", *SYNTHETIC, "--steps", 10_000_000, "--timeout-s", 600)
        ranks = [self.on(host, rank, 3, *flags) for rank, host in enumerate("AAB")]
        while "step 1/" not in ranks[0].stdout.readline():
            self.assertIsNone(ranks[0].poll())
        begin = self.cut()
        for number, rank in enumerate(ranks):
            _, error = rank.communicate(timeout=120)
            print(f"rank {number}: {time.monotonic() - begin:.1f} s after the cut: {error.strip()[-300:]}")
            self.assertEqual(rank.returncode, 1, error)
        # The limit allows for computation and for collecting the ranks' reports.
        self.assertLess(time.monotonic() - begin, GONE_AFTER_S + 10)

    def test_an_elastic_run_continues_on_the_side_of_the_majority(self):
        ranks = [self.on(host, rank, 3, "train", *SYNTHETIC, "--steps", 10_000_000, "--timeout-s", 600,
                         "--elastic", "2:3", "--log", f"{rank}.jsonl") for rank, host in enumerate("AAB")]
        while "step 1/" not in ranks[0].stdout.readline():
            self.assertIsNone(ranks[0].poll())
        begin = self.cut()
        while not any(r["type"] == "shrink" for r in self.whole_records("0.jsonl")):
            self.assertLess(time.monotonic() - begin, GONE_AFTER_S + 20)
            self.assertIsNone(ranks[0].poll())
            time.sleep(0.1)
        print(f"the majority continued {time.monotonic() - begin:.1f} s after the cut")
        self.assertNotEqual(ranks[2].wait(timeout=60), 0)

    def whole_records(self, name):
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines(keepends=True)
                if line.endswith("\n")]


if __name__ == "__main__":
    main()
