#!/usr/bin/env python3
"""Tests `gradwire plan`: its table, its JSON, the cluster files, and the input that it rejects."""
import json
import pathlib

from command import CommandTest, main

CLUSTERS = pathlib.Path(__file__).resolve().parents[2] / "trainer/plan/clusters"


class Plan(CommandTest):
    def plan(self, cluster, *words):
        return self.run_command("plan", "--cluster", cluster, "--model", "vit_tiny", *words)

    def write(self, **changes):
        cluster = {**json.loads((CLUSTERS / "h100-ib.json").read_text()), **changes}
        (self.folder / "cluster.json").write_text(json.dumps(cluster))
        return "cluster.json"

    def test_plans_every_cluster_file(self):
        for path in sorted(CLUSTERS.glob("*.json")):
            nodes = 1 if "article" in path.name else 2
            world = nodes * json.loads(path.read_text())["gpus_per_node"]
            result = self.plan(path, "--ranks", world, "--compression", "bf16")
            self.assertEqual((result.returncode, result.stderr), (0, ""), path)
            for word in ("nccl", "bf16", "ring", "speed", "Fastest"):
                self.assertIn(word, result.stdout)

    def test_takes_the_names_of_the_cluster_files(self):
        plans = {self.plan(cluster, "--ranks", 16, "--compression", "bf16").stdout
                 for cluster in ("h100-ib", "h100-ib.json", CLUSTERS / "h100-ib.json")}
        self.assertEqual(len(plans), 1)
        names = ", ".join(sorted(path.stem for path in CLUSTERS.glob("*.json")))
        self.assert_refused(self.plan("h100ib", "--ranks", 16), "did you mean 'h100-ib'?", names)

    def test_json_has_every_spec_and_schedule(self):
        result = self.plan(self.write(), "--ranks", 16, "--json", "plan.json")
        self.assertEqual(result.returncode, 0, result.stderr)
        plan = json.loads((self.folder / "plan.json").read_text())
        self.assertEqual(plan["levels"], ["nvlink", "nic"])
        found = {(row["compression"], row["schedule"]) for row in plan["rows"]}
        self.assertLessEqual({(spec, kind) for spec in ("bf16", "fp8", "powersgd:rank=4")
                              for kind in ("ring", "tree", "two_shot", "hierarchical")}, found)
        self.assertEqual(plan["rows"][0]["speed"], 1)
        self.assertTrue(all(row["best"]["step_ms"] > plan["compute_ms"] for row in plan["rows"]))

    def test_plans_4096_ranks(self):
        result = self.plan(self.write(switches=[{"nodes": 32, "oversubscription": 2}]), "--ranks", 4096,
                           "--compression", "bf16", "--json", "plan.json")
        self.assertEqual(result.returncode, 0, result.stderr)
        plan = json.loads((self.folder / "plan.json").read_text())
        self.assertEqual(plan["levels"], ["nvlink", "nic", "switch 1"])

    def test_reproduces_the_articles_speedups(self):
        """ViT-L/32 on 8 GPUs and PCIe: FP32 and BF16 in one bucket, BF16 in buckets, PowerSGD."""
        self.succeed("plan", "--cluster", CLUSTERS / "article-pcie-8.json", "--ranks", 8,
                     "--model", "vit_l_32", "--compression", "bf16",
                     "--compression", "powersgd:rank=4", "--json", "plan.json")
        rows = {(row["compression"], row["schedule"]): row
                for row in json.loads((self.folder / "plan.json").read_text())["rows"]}
        fp32 = rows["fp32", "nccl"]["tried"][-1]["step_ms"]  # one bucket
        bf16, powersgd = rows["bf16", "ring"], rows["powersgd:rank=4", "ring"]
        for step, published in ((bf16["tried"][-1], 1.65), (bf16["best"], 1.86),
                                (powersgd["best"], 701 * 7.5e-3)):
            self.assertAlmostEqual(fp32 / step["step_ms"] / published, 1, delta=0.15)

    def test_rejects_bad_input(self):
        link = {"gb_per_s": 0, "latency_us": 1}
        self.assert_refused(self.plan(self.write(speed=1), "--ranks", 16), "unknown key speed")
        self.assert_refused(self.plan(self.write(nvlink=link), "--ranks", 16), "nvlink.gb_per_s", "not 0")
        self.assert_refused(self.plan(self.write(), "--ranks", 12), "--ranks 12", "use 8 or 16")
        self.assert_refused(self.plan(self.write(), "--ranks", 0), "0")
        self.assert_refused(self.plan("nowhere.json", "--ranks", 8), "nowhere.json")
        self.assert_refused(self.plan(self.write(), "--ranks", 8, "--compression", "zip"), "zip")
        self.assert_refused(
            self.plan(self.write(), "--ranks", 128, "--compression", "bf16:schedule=two_shot"), "two_shot")
        self.assert_refused(self.run_command("plan", "--ranks", 8), "--cluster")


if __name__ == "__main__":
    main()
