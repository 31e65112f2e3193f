#!/usr/bin/env python3
"""Tests `gradwire train` with checkpoints: a stopped run resumes with its log, and damaged checkpoints are
rejected."""
import json
import shutil
import struct
import zlib

from command import CommandTest, main, synthetic


def without_id(blob):
    """Returns a checkpoint's file in the format of versions without "id"."""
    length, = struct.unpack_from("<Q", blob)
    header, data = json.loads(blob[8:8 + length]), blob[8 + length:]
    about = json.loads(header["__metadata__"]["gradwire"])
    del about["id"]
    header["__metadata__"]["gradwire"] = json.dumps(about)
    header["__metadata__"]["crc32"] = "00000000"
    text = json.dumps(header, separators=(",", ":")).encode()
    crc = f"{zlib.crc32(text + data):08x}".encode()
    text = text.replace(b'"crc32":"00000000"', b'"crc32":"' + crc + b'"')
    return struct.pack("<Q", len(text)) + text + data


class Checkpoints(CommandTest):
    RUN = ["train", "--ranks", "2", "--compression", "bf16", "--steps", "8", "--log", "run.jsonl"]

    def train(self, *extra):
        return self.run_command(*self.RUN, *synthetic(), *extra)

    def test_a_stopped_run_resumes_with_its_log_and_rejects_damage(self):
        saving = ["--checkpoint", "saved", "--checkpoint-every", "3", "--resume", "saved"]
        first = self.train(*saving)
        self.assertEqual(first.returncode, 0, first.stderr)
        self.assertIn("Nothing to resume in saved", first.stdout)
        records = self.records()
        self.assertEqual([r["step"] for r in records if r["type"] == "checkpoint"], [3, 6, 8])
        whole = [(r["step"], r["loss"]) for r in records if r["type"] == "step"]

        shutil.rmtree(self.folder / "saved" / "step-000000008")
        (self.folder / "saved" / "step-000000007.tmp").mkdir()
        with (self.folder / "run.jsonl").open("a") as log:
            log.write('{"type": "step", "st')  # truncated by a kill
        second = self.train(*saving)
        self.assertEqual(second.returncode, 0, second.stderr)
        self.assertIn("Ignoring saved/step-000000007.tmp: it was not finished", second.stdout)
        self.assertIn("Resuming from saved/step-000000006, after 6 of 8 steps", second.stdout)
        records = self.records()
        self.assertEqual([(r["step"], r["loss"]) for r in records if r["type"] == "step"], whole)
        self.assertEqual([r["type"] for r in records].count("run"), 1)
        self.assertEqual([r["step"] for r in records if r["type"] == "resume"], [6])
        self.assertEqual(records[-1]["type"], "summary")

        changed = self.train("--dry-run", "--lr", "0.5", "--resume", "saved")
        self.assertEqual(changed.returncode, 0, changed.stderr)
        self.assertIn("Note: the checkpoint was made with lr 0.001, now 0.5", changed.stdout)

        state = self.folder / "saved" / "step-000000008" / "state-1-of-2.safetensors"
        good = state.read_bytes()
        self.refuses_files_of_another_run(saving)
        state.write_bytes(good[:-100])
        self.assert_refused(self.train(*saving), "state-1-of-2.safetensors", "truncated")
        state.write_bytes(good[:-100] + bytes(100))
        self.assert_refused(self.train(*saving), "state-1-of-2.safetensors", "damaged", "checksum")

    def refuses_files_of_another_run(self, saving):
        """Replaces each file in turn by a file from a run with another seed, and by a file from a run with
        the same settings. Without an id, as in files of earlier versions, another seed is detected, and files
        of the same settings are loaded."""
        ours = self.folder / "saved" / "step-000000008"
        for other, seed in (("seed", 7), ("again", 0)):
            run = [word for word in self.RUN if word not in ("--log", "run.jsonl")]
            self.succeed(*run, *synthetic(), "--seed", seed, "--checkpoint", other)
            for name in ("model", "state-0-of-2", "state-1-of-2"):
                file = ours / f"{name}.safetensors"
                good, theirs = file.read_bytes(), (self.folder / other / ours.name / file.name).read_bytes()
                file.write_bytes(theirs)
                self.assert_refused(self.train(*saving), "another checkpoint", "seed" if seed else "id")
                if name != "state-0-of-2":
                    file.write_bytes(without_id(theirs))
                    self.assert_refused(self.train(*saving), file.name, "another checkpoint")
                file.write_bytes(good)
        shutil.copytree(ours, self.folder / "old" / ours.name)
        for file in (self.folder / "old" / ours.name).iterdir():
            file.write_bytes(without_id(file.read_bytes()))
        loaded = self.train("--dry-run", "--resume", "old")
        self.assertEqual(loaded.returncode, 0, loaded.stderr)
        run = [word if word != "8" else "9" for word in self.RUN if word not in ("--log", "run.jsonl")]
        self.succeed(*run, *synthetic(), "--resume", "old")

    def test_rejects_a_second_run_in_a_folder_until_the_first_has_ended(self):
        # The run saves no checkpoint until its end, so the folder is locked and empty on a machine of any
        # speed.
        saving = ["--checkpoint", "saved", "--checkpoint-every", "100000", "--resume", "saved"]
        long = [word if word != "8" else "100000" for word in self.RUN]
        first = self.train_until(3, *long, *synthetic(), *saving)
        second = self.run_command("train", *synthetic(), "--steps", 8, *saving)
        self.assert_refused(second, "saved: another run writes there", f"process {first.pid} on",
                            "another folder")
        first.kill()
        first.wait(60)
        self.assertEqual(self.run_command("train", *synthetic(), "--steps", 8, *saving).returncode, 0)

    def test_a_killed_run_continues_with_other_ranks_and_sharding(self):
        divided = [
            "train", *synthetic(), "--compression", "int8", "--bucket-mb", "0.002", "--checkpoint", "saved",
            "--checkpoint-every", "2"]
        first = self.train_until(7, *divided, "--shard", "optimizer", "--ranks", 3, "--steps", 100000)
        first.kill()
        first.wait(60)
        step = max(int(path.name.split("-")[1]) for path in (self.folder / "saved").glob("step-?????????"))
        self.assertGreaterEqual(step, 6)
        for ranks, shard in ((2, "optimizer"), (4, "none"), (1, "optimizer"), (3, "none")):
            step += 2
            again = self.succeed(*divided, "--resume", "saved", "--shard", shard, "--ranks", ranks,
                                 "--steps", step)
            self.assertIn("the sum of their residuals is kept", again.stdout)
            self.assertIn("2 steps in", again.stdout)

    def test_a_run_that_diverges_keeps_its_last_finite_checkpoint(self):
        for flags in ((), ("--ranks", 2, "--shard", "optimizer", "--compression", "int8")):
            folder = f"saved-{len(flags)}"
            diverging = synthetic(*flags, "--optimizer", "sgd", "--lr", "1e6", "--checkpoint", folder,
                                  "--checkpoint-every", 2, "--checkpoint-keep", 2, "--log", f"{folder}.jsonl")
            for steps, resume in ((30, ()), (40, ("--resume", folder))):
                run = self.run_command("train", *diverging, "--steps", steps, *resume)
                self.assertEqual(run.returncode, 3, run.stderr)
                self.assertRegex(run.stderr, r"\A.*warning: .*the loss of step 3 is nan; .*\n\Z")
                self.assertNotIn("-nan", run.stdout)
                left = {path.parent.name: (path.parent / "not-finite").exists()
                        for path in (self.folder / folder).glob("*/model.safetensors")}
                self.assertEqual(left, {"step-000000002": False, f"step-0000000{steps - 2}": True,
                                        f"step-0000000{steps}": True})
            self.assertIn("Ignoring saved-", run.stdout)
            self.assertRegex(self.run_command("top", f"{folder}.jsonl", "--prometheus").stdout,
                             r"\ngradwire_loss\{.*\} NaN\n")
            named = self.run_command("train", *synthetic("--optimizer", "sgd", "--steps", 31, "--resume",
                                                         f"{folder}/step-000000040"))
            self.assertIn("is at step 40", named.stderr)  # a checkpoint that is named itself is not ignored

    def test_top_shows_the_settings_of_a_resumed_run(self):
        self.train("--checkpoint", "saved")
        self.succeed("train", *synthetic(), "--ranks", 3, "--steps", 12, "--compression", "int8", "--resume",
                     "saved", "--log", "run.jsonl")
        text, metrics = (self.run_command("top", "run.jsonl", *more).stdout
                         for more in ((), ("--prometheus",)))
        self.assertRegex(text, r"^vit_tiny on 3 ranks \(threads, host\), int8, .*\nstep 12 of 12 \(100 %\)")
        self.assertRegex(metrics, r"steps_planned\{.*\} 12\n")

    def test_rejects_contradictory_options(self):
        self.assertEqual(self.train("--checkpoint", "saved").returncode, 0)
        (self.folder / "broken").write_text("{}")
        files = self.files()
        for extra, parts in ((["--checkpoint",
                               "saved"], ["saved", "already",
                                          "--resume"]), (["--checkpoint", "saved", "--resume",
                                                          "nowhere"], ["saved", "already"]),
                             (["--resume",
                               "nowhere"], ["nowhere",
                                            "no such folder"]), (["--resume",
                                                                  "."], ["no complete checkpoint"]),
                             (["--checkpoint", self.program], [self.program, "not a folder"]),
                             (["--checkpoint-every",
                               "3"], ["--checkpoint-every needs --checkpoint"
                                      ]), (["--checkpoint", "new", "--checkpoint-every",
                                            "0"], ["--checkpoint-every: '0'"
                                                   ]), (["--checkpoint", "new", "--checkpoint-keep",
                                                         "0"], ["--checkpoint-keep: '0'"]),
                             (["--init",
                               "run.jsonl"], ["--init run.jsonl", "--log run.jsonl",
                                              "the same file"]), (["--init",
                                                                   "broken"], ["broken", "safetensors"]),
                             (["--init", "nowhere"], ["nowhere",
                                                      "no such file"]), (["--init", "x", "--resume",
                                                                          "saved"], ["--init", "--resume"]),
                             (["--optimizer", "sgd", "--resume", "saved"], ["optimizer", "adamw", "sgd"])):
            with self.subTest(extra=extra):
                self.assert_refused(self.train(*extra), *parts)
                self.assertEqual(self.files(), files)
        deeper = self.run_command("train", *synthetic("--depth", "2"), "--init",
                                  "saved/step-000000008/model.safetensors")
        self.assert_refused(deeper, "missing: encoder.layers.encoder_layer_1", "more")


if __name__ == "__main__":
    main()
