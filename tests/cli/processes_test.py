#!/usr/bin/env python3
"""Tests ranks that are processes, started by hand. tests/integrations/launchers_test.py uses real
launchers."""
import json
import os
import pathlib
import socket
import subprocess
import sys
import unittest

from command import CommandTest, SMALL, SYNTHETIC, as_user, main, synthetic

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integrations"))
from launch import free_port  # noqa: E402


class Processes(CommandTest):
    def kill(self, processes, rank, step):
        """Kills a rank once rank 0 has printed the step."""
        while f"step {step}/" not in processes[0].stdout.readline():
            self.assertIsNone(processes[0].poll())
        processes[rank].kill()

    def run_processes(self, world, *arguments, code=0, **options):
        return self.ends(self.start(world, *arguments, **options), code)

    def numbers(self, name):
        keys = ("type", "step", "loss", "lr", "test_loss", "test_accuracy", "wire_bytes", "final_loss")
        records = [r for r in self.records(name) if r["type"] != "waits"]  # their number depends on timing
        return [[r.get(key) for key in keys] for r in records]

    def rows(self, name):
        """Returns the number of spans of each stream of each rank in a trace. Excludes exchanges, whose
        number of slices depends on measured link costs."""
        events = json.loads((self.folder / name).read_text())["traceEvents"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        spans = [(e["pid"], names[e["pid"], e["tid"]]) for e in events
                 if e["ph"] == "X" and e["cat"] != "exchange"]
        return {row: spans.count(row) for row in spans}

    def test_same_bits_as_threads(self):
        for world, spec, data in ((2, "fp32:schedule=ring",
                                   ["--data", "synthetic:128", "--batch-size", 8, "--device",
                                    "host"]), (2, "bf16:round=stochastic,schedule=two_shot", SYNTHETIC),
                                  (3, "powersgd:rank=1,schedule=tree", SYNTHETIC)):
            flags = ["train", *data, "--steps", 5, "--compression", spec, "--trace"]
            threads = self.succeed(*flags, "threads.json", "--ranks", world, "--log", "threads.jsonl")
            ends = self.run_processes(world, *flags, "processes.json", *(["--graph"] if world == 3 else []),
                                      "--log", "processes.jsonl")
            if world < 3:  # a graph has no marks for each exchange
                self.assertEqual(self.rows("threads.json"), self.rows("processes.json"), spec)
            self.assertEqual(self.numbers("threads.jsonl"), self.numbers("processes.jsonl"), spec)
            self.assertEqual([r[0] for r in self.numbers("processes.jsonl")],
                             ["run"] + ["step"] * 5 + ["eval", "summary"])
            self.assertIn(f"Launcher: the environment (RANK=0 WORLD_SIZE={world}), rendezvous at file://",
                          ends[0][0])
            self.assertEqual(set(ends[1:]), {("", "")}, "only rank 0 prints")

    def test_compare_reuses_an_earlier_run_found_by_rank_0(self):
        def compare():
            return self.run_processes(2, "compare", *SYNTHETIC, "--steps", 2, "--compression", "fp32",
                                      "--compression", "bf16", "--json", "out.json", "--rendezvous",
                                      f"tcp://127.0.0.1:{free_port()}")

        compare()
        self.assertEqual(self.files(), ["out.0.jsonl", "out.1.jsonl", "out.json"])
        self.assertEqual([r["ranks"] for r in json.loads((self.folder / "out.json").read_text())], [2, 2])
        first = self.numbers("out.0.jsonl")
        (self.folder / "out.0.jsonl").unlink()
        ends = compare()
        self.assertIn("[2/2] bf16: already done", ends[0][0])
        self.assertEqual(ends[1], ("", ""), "only rank 0 prints")
        self.assertEqual(self.numbers("out.0.jsonl"), first)

    def test_doctor(self):
        ends = self.run_processes(3, "doctor", "--model", "vit_tiny", "--batch-size", 8, "--timeout-s", 60,
                                  "--device", "host", "--json", "doctor.json")
        self.assertEqual(ends[1], ("", ""), "only rank 0 prints")
        for word in ("Links between 3 ranks, transport tcp", "rank 1", "Prediction: vit_tiny",
                     "Recommendation: "):
            self.assertIn(word, ends[0][0])
        found = json.loads((self.folder / "doctor.json").read_text())
        self.assertEqual(found["ranks"]["world"], 3)
        self.assertGreater(found["ranks"]["pairs"][0]["gb_per_s"], 0)
        best = found["prediction"]["best"]
        self.assertEqual([p["compression"] for p in best[:2]], ["fp32", "bf16"])
        self.assertIn(found["prediction"]["recommended"], best)

    def test_a_port_occupied_by_torchruns_agent(self):
        """Occupies MASTER_PORT, as torchrun's agent does."""
        with socket.socket() as agent:
            agent.bind(("127.0.0.1", 0))
            agent.listen()
            ends = self.run_processes(2, "train", *SYNTHETIC, "--steps", 1, MASTER_ADDR="127.0.0.1",
                                      MASTER_PORT=str(agent.getsockname()[1]), TORCHELASTIC_RUN_ID="none",
                                      TORCHELASTIC_USE_AGENT_STORE="True")
        self.assertIn("Launcher: torchrun (RANK=0 WORLD_SIZE=2)", ends[0][0])

    def test_other_machines_need_a_secret(self):
        apart = {"MASTER_ADDR": "192.0.2.1", "LOCAL_WORLD_SIZE": "1"}
        self.ends(self.start(2, "train", *SYNTHETIC, "--timeout-s", 1, **apart), 2,
                  "this run has no secret; set GRADWIRE_SECRET")
        for env in {"GRADWIRE_INSECURE": "1"}, {"GRADWIRE_SECRET": "known"}:
            process = self.start(2, "train", *SYNTHETIC, "--timeout-s", 1, **apart, **env)[0]
            error = process.communicate(timeout=240)[1]
            self.assertNotIn("this run has no secret", error)
            self.assertIn("192.0.2.1", error, "the run gets as far as listening there")
            self.assertEqual("WARNING" in error, "GRADWIRE_SECRET" not in env, error)

    def test_a_secrets_file_must_be_readable_only_by_its_owner(self):
        secret = self.folder / "secret"
        secret.write_text("one\n")
        secret.chmod(0o600)
        flags = ["train", *SYNTHETIC, "--steps", 1, "--timeout-s", 10]
        self.run_processes(2, *flags, GRADWIRE_SECRET_FILE=str(secret))
        secret.chmod(0o644)
        self.ends(self.start(2, *flags, GRADWIRE_SECRET_FILE=str(secret)), 2, "chmod 600")
        os.mkfifo(self.folder / "pipe")
        self.ends(self.start(2, *flags, GRADWIRE_SECRET_FILE=str(self.folder / "pipe")), 2,
                  "not a regular file")

    @unittest.skipUnless(os.geteuid() == 0, "only root can give files to other users")
    def test_a_secrets_file_may_belong_to_root_and_a_group_of_the_process(self):
        """Reads a secret mounted as by Kubernetes with fsGroup. One rank suffices, because the rank reads the
        file before waiting for other ranks."""
        secret = self.folder / "secret"
        secret.write_text("one\n")
        secret.chmod(0o600)
        self.folder.chmod(0o755)
        for owner, mode, right in ((0, 0o440, True), (0, 0o640, True), (0, 0o400, False), (0, 0o460, False),
                                   (0, 0o444, False), (54321, 0o440, False)):
            os.chown(secret, owner, 12345)
            secret.chmod(mode)
            program = pathlib.Path(self.program)
            command = [
                *as_user(54320, self.folder, program.parents[1], groups=[12345]), f"bin/{program.name}",
                "train", *SYNTHETIC, "--steps", "1", "--timeout-s", "0.2"]
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=240, cwd="/", env=self.environment({
                    "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9",
                    "GRADWIRE_SECRET_FILE": str(secret)}))
            place = f"owner {owner}, mode {mode:o}: {ended.stderr}"
            self.assertEqual(ended.returncode, 1 if right else 2, place)
            self.assertIn("did not reach rank 0" if right else "GRADWIRE_SECRET", ended.stderr, place)

    def test_ports_and_interface_follow_the_environment(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            elsewhere = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            ends = self.run_processes(2, "train", *SYNTHETIC, "--steps", 1, "--timeout-s", 10, code=1,
                                      **elsewhere, GRADWIRE_PORTS=f"{port}-{port}")
            self.assertIn(f"127.0.0.1:{port}", ends[0][1])
        first = free_port()
        self.run_processes(2, "train", *SYNTHETIC, "--steps", 1,
                           GRADWIRE_PORTS=f"{first}-{min(65535, first + 20)}", GRADWIRE_INTERFACE="lo")
        for name, value, expected in (("GRADWIRE_PORTS", "20100-20000", "20100"),
                                      ("GRADWIRE_PORTS", "0", "'0'"), ("GRADWIRE_PORTS", "many", "'many'"),
                                      ("GRADWIRE_INTERFACE", "nosuch0", "no network interface 'nosuch0'")):
            self.ends(self.start(2, "train", *SYNTHETIC, "--steps", 1, **elsewhere, **{name: value}), 2, name,
                      expected)

    def test_rejects_ranks_with_different_flags(self):
        processes = self.start(3, "train", *SYNTHETIC, own={2: ["--lr", "0.5"]})
        ends = [p.communicate(timeout=240)[1] for p in processes]
        self.assertEqual([p.returncode for p in processes], [2, 1, 1], ends)
        for error in ends:
            self.assertIn(
                'rank 2 was started with other settings or data than rank 0: "lr": 0.5 there, "lr": 0.001'
                " here", error)

    def test_rejects_a_rank_with_another_arithmetic(self):
        """Imitates ranks on different processors, or ranks of which only some have a sanitizer."""
        processes = self.start(2, "train", *SYNTHETIC, own_env={1: {"GRADWIRE_BLAS_KERNELS": "Prescott"}})
        for process in processes:
            error = process.communicate(timeout=240)[1]
            self.assertNotEqual(process.returncode, 0)
            self.assertIn("rank 1 was started with other settings or data than rank 0: \"arithmetic\": ",
                          error)
            self.assertIn("Prescott kernels", error)

    def test_rejects_a_rank_with_other_images_at_the_same_path(self):
        folders = [self.folder / "a", self.folder / "b"]  # the path is relative to a folder
        batches = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
        for label, folder in enumerate(folders):
            (folder / "images").mkdir(parents=True)
            for batch in batches:
                (folder / "images" / batch).write_bytes((bytes([label]) + bytes(3072)) * 8)
        processes = self.start(2, "train", "--data", "cifar10:images", "--batch-size", 2, "--steps", 1,
                               "--image-size", 32, "--patch", 8, *SMALL, folders=folders)
        for process in processes:
            error = process.communicate(timeout=240)[1]
            self.assertNotEqual(process.returncode, 0)
            self.assertIn("rank 1 was started with other settings or data than rank 0", error)
            self.assertIn("with checksums", error)

    def test_a_killed_rank_ends_the_others(self):
        processes = self.start(3, "train", *SYNTHETIC, "--steps", 100000, "--log", "run.jsonl")
        self.kill(processes, 2, step=3)
        for _, error in self.ends(processes[:2], 1, "rank 2"):
            self.assertEqual(len(error.splitlines()), 1, error)
        self.records()  # every line is complete

    def test_elastic_continues_without_rank_0(self):
        """Kills rank 0. Another rank prints, logs, saves and writes the summary."""
        processes = self.start(3, "train", *synthetic("--log-every", 100, "--steps", 400), "--log",
                               "run.jsonl", "--checkpoint", "saved", "--checkpoint-every", 50,
                               "--compression", "powersgd:rank=2", "--elastic", "2:3", "--timeout-s", 30)
        self.kill(processes, 0, step=100)
        ends = self.ends(processes[1:])
        self.assertEqual(ends[1], ("", ""), "only rank 0 prints")
        for word in ("Lost rank 0 and its residual of norm ", "with 2 ranks (1, 2)", "steps in "):
            self.assertIn(word, ends[0][0])
        records = self.records()
        steps = [r["step"] for r in records if r["type"] == "step"]
        self.assertEqual(steps, sorted(set(steps)))
        self.assertEqual(steps[-1], 399)
        self.assertGreaterEqual(len(steps), 398, "at most two steps were not reported")
        shrink = [r for r in records if r["type"] == "shrink"]
        self.assertEqual([(r["lost"], r["ranks"], r["global_batch"]) for r in shrink], [([0], [1, 2], 48)])
        self.assertEqual(records[-1]["type"], "summary")
        self.assertTrue((self.folder / "saved" / "step-000000400" / "state-1-of-2.safetensors").exists())

    def test_elastic_admits_a_new_rank(self):
        flags = [
            "train", *synthetic("--log-every", 100), "--steps", 1500, "--log", "run.jsonl", "--checkpoint",
            "saved", "--checkpoint-every", 500, "--compression", "powersgd:rank=2", "--elastic", "1:2",
            "--timeout-s", 30]
        processes = self.start(2, *flags)
        self.kill(processes, 0, step=100)
        joiner = self.succeed(*flags, "--join", "saved/members")
        self.assertEqual(joiner.stdout,
                         "Joining the run of saved/members: waiting for its ranks to finish a step\n")
        out, error = processes[1].communicate(timeout=240)
        self.assertEqual(processes[1].returncode, 0, error)
        self.assertRegex(out,
                         "Rank 2 joined. Continuing after step [0-9]+ with 2 ranks .1, 2., 32 images per "
                         "step")
        records = self.records()
        self.assertEqual([(r["joined"], r["ranks"]) for r in records if r["type"] == "grow"], [([2], [1, 2])])
        self.assertTrue((self.folder / "saved" / "step-000001500" / "state-1-of-2.safetensors").exists())
        self.assertFalse((self.folder / "saved" / "members").exists(), "the run has ended")
        late = self.run_command(*flags, "--join", "saved/members")
        self.assertEqual(late.returncode, 2)
        self.assertIn("saved/members: no such file; name the file that the run's --members names",
                      late.stderr)

    def test_elastic_ends_when_too_few_are_left(self):
        processes = self.start(3, "train", *SYNTHETIC, "--steps", 100000, "--elastic", "3:3")
        self.kill(processes, 2, step=3)
        for _, error in self.ends(processes[:2], 1, "2 of 3 ranks are left (lost: 2), fewer than the 3 that "
                                  "--elastic 3:3 asks for; start the run again"):
            self.assertEqual(len(error.splitlines()), 1, error)


if __name__ == "__main__":
    main()
