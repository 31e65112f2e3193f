#!/usr/bin/env python3
"""`gradwire compare`: its table and its files."""
import json

from command import CommandTest, SYNTHETIC, main


class Compare(CommandTest):
    def test_table_and_files(self):
        result = self.run_command("compare", *SYNTHETIC, "--ranks", 2, "--steps", 3, "--compression", "fp32", "--compression",
                                  "bf16", "--compression", "powersgd:rank=1", "--json", "out.json")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.files(), ["out.0.jsonl", "out.1.jsonl", "out.2.jsonl", "out.json"])
        runs = json.loads((self.folder / "out.json").read_text())
        self.assertEqual([r["compression"] for r in runs], ["fp32", "bf16", "powersgd:rank=1"])
        for run in runs:
            self.assertEqual(set(run), {"compression", "test_accuracy", "final_loss", "step_ms", "images_per_s", "wire_bytes",
                                        "dense_bytes", "ratio", "exposed_comm_ms", "ranks", "device", "schedule", "bucket_mb"})
            self.assertEqual(run["dense_bytes"], runs[0]["wire_bytes"])
        self.assertAlmostEqual(runs[0]["ratio"], 1.0)
        self.assertGreater(runs[1]["ratio"], 1.9)
        table = result.stdout[result.stdout.index("compression  "):].splitlines()
        self.assertEqual([line.split()[0] for line in table[2:5]], ["fp32", "bf16", "powersgd:rank=1"])

    def test_all_start_from_the_same_weights(self):
        self.run_command("compare", *SYNTHETIC, "--ranks", 2, "--steps", 1, "--compression", "fp32", "--compression", "bf16",
                         "--bucket-mb", 0.002, "--bucket-mb", 25, "--json", "out.json")
        logs = [self.records(f"out.{i}.jsonl") for i in range(4)]
        self.assertEqual(len({log[1]["loss"] for log in logs}), 1)
        # Every compression with every bucket size.
        self.assertEqual([(log[0]["compression"], log[0]["bucket_mb"]) for log in logs],
                         [("fp32", 0.002), ("fp32", 25), ("bf16", 0.002), ("bf16", 25)])
        self.assertGreater(logs[0][0]["buckets"], logs[1][0]["buckets"])
        self.assertEqual([r["bucket_mb"] for r in json.loads((self.folder / "out.json").read_text())], [0.002, 25, 0.002, 25])


if __name__ == "__main__":
    main()
