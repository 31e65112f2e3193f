#!/usr/bin/env python3
"""Whole training steps on one GPU: `gradwire train` and PyTorch, eager and through torch.compile, in turns.

    gpu_training.py --gradwire build/bin/gradwire --json FILE   ViT-L/32, batch 32, in FP32, TF32 and BF16
    gpu_training.py --device cpu --tiny --precision fp32 ...    without a GPU, to test this program

PyTorch: torchvision's model (or, without torchvision, the same layers from torch.nn), plain SGD, gradients
set to None, images that stay on the device. BF16 is autocast with FP32 weights, like --precision bf16. With
--gelu tanh both sides use the tanh form of GELU. CUDA events time a step. Gradwire: a world of 1, synthetic
images, with and without --graph; medians of its log. Then, in the first precision, two ranks that share the
GPU and exchange gradients in groups of 2 and of 4 layers (--gradient-group). Compare these only with each
other.
"""
import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # bench/
from harness import report, smoke  # noqa: E402

try:
    import torch
except ImportError:
    sys.exit("gpu_training: PyTorch is missing; install it, or measure with gradwire train alone")

SIZES = {"vit_l_32": dict(image_size=224, patch_size=32, num_layers=24, num_heads=16, hidden_dim=1024,
                          mlp_dim=4096),
         "tiny": dict(image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128)}
GRADWIRE_SIZES = {"vit_l_32": ["--model", "vit_l_32"],
                  "tiny": ["--model", "vit_s_16", "--image-size", "32", "--patch", "8", "--depth", "2",
                           "--heads", "4", "--width", "64", "--mlp", "128"]}


class Layer(torch.nn.Module):
    """One encoder layer, as in torchvision."""

    def __init__(self, width, heads, mlp):
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width, eps=1e-6), torch.nn.LayerNorm(width, eps=1e-6)
        self.attention = torch.nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, mlp), torch.nn.GELU(),
                                       torch.nn.Linear(mlp, width))

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Vit(torch.nn.Module):
    """Replaces torchvision's model on machines without torchvision."""

    def __init__(self, image_size, patch_size, num_layers, num_heads, hidden_dim, mlp_dim):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, hidden_dim, patch_size, patch_size)
        self.token = torch.nn.Parameter(torch.zeros(1, 1, hidden_dim))
        tokens = (image_size // patch_size) ** 2 + 1
        self.position = torch.nn.Parameter(torch.randn(1, tokens, hidden_dim) * 0.02)
        self.layers = torch.nn.Sequential(*(Layer(hidden_dim, num_heads, mlp_dim) for _ in range(num_layers)))
        self.norm, self.head = torch.nn.LayerNorm(hidden_dim, eps=1e-6), torch.nn.Linear(hidden_dim, 1000)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.layers(x))[:, 0])


def build(sizes):
    try:
        import torchvision
        return torchvision.models.VisionTransformer(**sizes), f"torchvision {torchvision.__version__}"
    except (ImportError, RuntimeError):
        return Vit(**sizes), "torch.nn"


class PyTorch:
    def __init__(self, arguments, precision, compiled):
        self.arguments, self.device = arguments, torch.device(arguments.device)
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        model, self.source = build(SIZES[arguments.model])
        for module in model.modules():
            if isinstance(module, torch.nn.GELU):
                module.approximate = "tanh" if arguments.gelu == "tanh" else "none"
        self.model = model.to(self.device).train()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = self.sgd()
        if compiled:
            self.model = torch.compile(self.model)
        side = SIZES[arguments.model]["image_size"]
        self.images = torch.randn(arguments.batch_size, 3, side, side, device=self.device)
        self.labels = torch.arange(arguments.batch_size, device=self.device)
        self.cast = contextlib.nullcontext
        if precision == "bf16":
            self.cast = lambda: torch.autocast(self.device.type, dtype=torch.bfloat16)

    def sgd(self):
        """Returns the fastest SGD of this PyTorch: one kernel for all parameters if available."""
        for fast in ({"fused": True}, {"foreach": True}, {}):
            with contextlib.suppress(TypeError, RuntimeError):
                return torch.optim.SGD(self.model.parameters(), lr=0.01,
                                       **(fast if self.device.type == "cuda" else {}))
        raise SystemExit("gpu_training: torch.optim.SGD accepts none of the options tried")

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        with self.cast():
            loss = torch.nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss

    def marks(self, count):
        """Returns the milliseconds of `count` consecutive steps, without synchronizing between them."""
        if self.device.type != "cuda":
            times = [time.perf_counter()]
            for _ in range(count):
                self.step()
                times.append(time.perf_counter())
            return [(b - a) * 1e3 for a, b in zip(times, times[1:])]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(events, events[1:])]

    def measure(self):
        self.marks(self.arguments.warmup)  # compiles
        return self.marks(self.arguments.steps)


def pytorch_row(arguments, precision, compiled):
    row = {"who": "torch.compile" if compiled else "PyTorch eager", "precision": precision}
    if compiled and not hasattr(torch, "compile"):
        return {**row, "error": f"torch {torch.__version__} has no torch.compile"}
    try:
        baseline = PyTorch(arguments, precision, compiled)
        return {**row, "step_ms": baseline.measure(), "parameters": baseline.parameters,
                "model": baseline.source}
    except Exception as error:  # torch.compile can fail in many ways; keep the other rows
        return {**row, "error": (str(error).splitlines() or [type(error).__name__])[0][:200]}
    finally:
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


def gradwire_row(arguments, precision, graph, group=None):
    """Measures Gradwire on one rank or, with a group, on two that exchange that many layers together."""
    flags = ["--graph"] if graph else ["--gradient-group", str(group)] if group else []
    row = {"who": " ".join(["Gradwire", *(["--ranks 2"] if group else []), *flags]), "precision": precision}
    with tempfile.TemporaryDirectory(prefix="gradwire-gpu-") as folder:
        log = pathlib.Path(folder) / "run.jsonl"
        command = [
            arguments.gradwire, "train", *GRADWIRE_SIZES[arguments.model], "--data", "synthetic", "--device",
            "host" if arguments.device == "cpu" else "cuda", "--ranks", "2" if group else "1", "--batch-size",
            str(arguments.batch_size), "--steps",
            str(arguments.warmup + arguments.steps), "--optimizer", "sgd", "--lr", "0.01", "--momentum", "0",
            "--eval-every", "0", "--precision", precision, "--gelu", arguments.gelu, "--log",
            str(log), *flags
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.deadline_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            return {**row, "error": str(error)[:200]}
        if done.returncode != 0:
            return {**row, "error": (done.stderr.strip().splitlines()
                                     or [f"exited with code {done.returncode}"])[-1][:200]}
        read = report.read_log(log, arguments.warmup)
    return {**row, "step_ms": read["step_ms"], "parameters": read["parameters"]}


def medians(rows):
    """Returns (precision, who) -> the median step over all repetitions."""
    all_ms = {}
    for row in rows:
        if "step_ms" in row:
            all_ms.setdefault((row["precision"], row["who"]), []).extend(row["step_ms"])
    return {key: statistics.median(ms) for key, ms in all_ms.items()}


def goal_lines(rows):
    """Returns the project's goals on one GPU, and whether each is met."""
    ms = medians(rows)
    ours = {p: min((ms[p, w] for w in ("Gradwire", "Gradwire --graph") if (p, w) in ms), default=None)
            for p in ("fp32", "tf32", "bf16")}
    wanted = [("bf16", "torch.compile", 1.2), ("fp32", "PyTorch eager", 1.0), ("tf32", "PyTorch eager", 1.0)]
    lines = []
    for precision, baseline, least in wanted:
        if ours[precision] and (precision, baseline) in ms:
            ratio = ms[precision, baseline] / ours[precision]
            lines.append(f"{precision}: {ratio:.2f}x of {baseline}'s steps/s (goal {least:g}x): "
                         f"{'met' if ratio >= least else 'NOT MET'}")
    for precision in ours:
        if (precision, "Gradwire") in ms and (precision, "Gradwire --graph") in ms:
            ratio = ms[precision, "Gradwire"] / ms[precision, "Gradwire --graph"]
            lines.append(f"{precision}: --graph {ratio:.2f}x as fast as without (goal 1x): "
                         f"{'met' if ratio >= 1 else 'NOT MET'}")
    return lines


def table(rows, batch_size):
    ms = medians(rows)
    out = [["precision", "", "ms/step", "steps/s", "images/s"]]
    for key in dict.fromkeys((r["precision"], r["who"]) for r in rows):
        error = next((r["error"] for r in rows if (r["precision"], r["who"]) == key and "error" in r), "")
        if key in ms:
            out.append([*key, f"{ms[key]:.2f}", f"{1e3 / ms[key]:.2f}", f"{1e3 * batch_size / ms[key]:.0f}"])
        else:
            out.append([*key, "-", "-", error])
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--gradwire", default="build/bin/gradwire")
    parser.add_argument("--tiny", dest="model", action="store_const", const="tiny", default="vit_l_32",
                        help="a tiny model, to test this program")
    parser.add_argument("--precision", action="append", choices=["fp32", "tf32", "bf16"],
                        help="default: all three")
    parser.add_argument("--gelu", choices=["exact", "tanh"], default="exact", help="of both sides")
    parser.add_argument("--gradient-group", type=int, action="append", metavar="N",
                        help="of two ranks on the GPU; default: 2 and 4")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=1,
                        help="of Gradwire and eager; compiled models run once")
    parser.add_argument("--deadline-s", type=int, default=120, help="deadline of one run of gradwire")
    parser.add_argument("--no-compile", action="store_true",
                        help="without torch.compile, which takes a minute per precision")
    parser.add_argument("--no-graph", action="store_true", help="without --graph")
    parser.add_argument("--json", type=pathlib.Path)
    smoke.add(parser, device="cpu", model="tiny", precision=["fp32"], steps=1, warmup=1, batch_size=1,
              no_compile=True)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_training: PyTorch sees no GPU")
    rows = []

    def add(row):
        rows.append(row)
        told = row.get("error") or f"{statistics.median(row['step_ms']):.2f} ms"
        print(f"{row['precision']}  {row['who']}: {told}", flush=True)
        if arguments.json:  # after each row, so that a later failure loses nothing
            arguments.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")

    settings = {
        "model": arguments.model, "gelu": arguments.gelu, "batch_size": arguments.batch_size,
        "torch": torch.__version__, "device": arguments.device,
        "device_name": torch.cuda.get_device_name() if arguments.device == "cuda" else "host"
    }
    for precision in arguments.precision or ["bf16", "tf32", "fp32"]:
        for repetition in range(arguments.repetitions):
            add(gradwire_row(arguments, precision, graph=False))
            if not arguments.no_graph:
                add(gradwire_row(arguments, precision, graph=True))
            add(pytorch_row(arguments, precision, compiled=False))
            if repetition == 0 and not arguments.no_compile:
                add(pytorch_row(arguments, precision, compiled=True))
    for group in arguments.gradient_group or [2, 4]:
        add(gradwire_row(arguments, (arguments.precision or ["bf16"])[0], graph=False, group=group))
    print("\n" + report.plain(table(rows, arguments.batch_size)) + "\n")
    print("\n".join(goal_lines(rows)))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
