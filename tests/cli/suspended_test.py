#!/usr/bin/env python3
"""Tests jobs that are suspended for longer than their deadline (Ctrl-Z, docker pause, a batch system). The
jobs continue. If only some ranks are stopped, the other ranks report the stopped ranks as missing."""
import os
import signal
import time

from command import CommandTest, SMALL, main

TIMEOUT_S, SUSPENDED_S = 5, 7
ENDLESS = [
    "train", "--data", "synthetic:256", "--batch-size", 16, *SMALL, "--steps", 10_000_000, "--timeout-s",
    TIMEOUT_S]
TIMES = 8 if os.environ.get("GRADWIRE_FULL_SWEEPS") else 2


class Suspended(CommandTest):
    def begin(self, world, *arguments, **variables):
        processes = self.start(world, *ENDLESS, *arguments, **variables)
        while "step 1/" not in processes[0].stdout.readline():
            self.assertIsNone(processes[0].poll(), processes[0].stderr.read() if processes[0].poll() else "")
        return processes

    def suspend(self, processes):
        for i in range(TIMES):
            time.sleep(0.1 + 0.07 * i)
            for number, pause in ((signal.SIGSTOP, SUSPENDED_S), (signal.SIGCONT, 0.2)):
                for p in processes:
                    p.send_signal(number)
                time.sleep(pause)
            for p in processes:
                self.assertIsNone(
                    p.poll(),
                    "a suspended job has ended: " + (p.stderr.read() if p.poll() is not None else ""))

    def test_threads_continue(self):
        self.suspend(self.begin(1, "--ranks", 3, MASTER_ADDR="127.0.0.1", MASTER_PORT="0"))

    def test_processes_continue(self):
        self.suspend(self.begin(3, "--compression", "int8"))

    def test_a_single_stopped_rank_is_reported_at_the_deadline(self):
        ranks = self.begin(3)
        time.sleep(0.2)
        begin = time.monotonic()
        ranks[2].send_signal(signal.SIGSTOP)
        for r in ranks[:2]:
            _, error = r.communicate(timeout=60)
            self.assertEqual(r.returncode, 1)
            # Rank 0 may detect the stopped rank while asking the other ranks for their reports.
            self.assertRegex(error, rf"(not done|nothing) after {TIMEOUT_S * 1000} ms")
        self.assertGreater(time.monotonic() - begin, TIMEOUT_S - 0.5)


if __name__ == "__main__":
    main()
