"""The baseline of the experiment gpu_training: steps of a ViT in PyTorch, eager, compiled and captured.

torchvision's model (or, without torchvision, the same layers from torch.nn), plain SGD, gradients set to
None, images that stay on the device. BF16 is autocast with FP32 weights. CUDA events time a step. A captured
step is one CUDA graph, so that the host's launches cost nothing.

    pytorch_vit.py MODEL DEVICE    captured steps in BF16, for a trace of their kernels
"""
import contextlib
import statistics
import sys
import time
import types

import torch

SIZES = {"vit_l_32": dict(image_size=224, patch_size=32, num_layers=24, num_heads=16, hidden_dim=1024,
                          mlp_dim=4096),
         "tiny": dict(image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128)}


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
    """Training steps of the model on one device."""

    def __init__(self, options, precision, compiled, captured=False):
        self.options, self.device = options, torch.device(options.device)
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        model, self.source = build(SIZES[options.model])
        for module in model.modules():
            if isinstance(module, torch.nn.GELU):
                module.approximate = "tanh" if options.gelu == "tanh" else "none"
        self.model = model.to(self.device).train()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = self.sgd()
        if compiled:
            self.model = torch.compile(self.model)
        side = SIZES[options.model]["image_size"]
        self.images = torch.randn(options.batch_size, 3, side, side, device=self.device)
        self.labels = torch.arange(options.batch_size, device=self.device)
        self.cast = contextlib.nullcontext
        if precision == "bf16":
            # A graph that uses a cast weight must contain the cast, because weights change between replays.
            self.cast = lambda: torch.autocast(self.device.type, dtype=torch.bfloat16,
                                               cache_enabled=not captured)
        self.run = self.captured_step() if captured else self.step

    def sgd(self):
        """Returns the fastest SGD of this PyTorch: one kernel for all parameters if available."""
        for fast in ({"fused": True}, {"foreach": True}, {}):
            with contextlib.suppress(TypeError, RuntimeError):
                return torch.optim.SGD(self.model.parameters(), lr=0.01,
                                       **(fast if self.device.type == "cuda" else {}))
        raise SystemExit("gpu_training: torch.optim.SGD accepts none of fused, foreach and no option")

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        with self.cast():
            loss = torch.nn.functional.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss

    def captured_step(self):
        """Returns a function that replays a whole step as one CUDA graph. On the CPU, runs the step."""
        side = contextlib.nullcontext()
        if self.device.type == "cuda":
            side = torch.cuda.stream(torch.cuda.Stream())
            torch.cuda.synchronize()
        with side:
            for _ in range(4):  # compiles, and allocates gradients and cuBLAS's workspaces
                self.step()
        if self.device.type != "cuda":
            return self.step
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def marks(self, count):
        """Returns the milliseconds of `count` consecutive steps, without synchronizing between them."""
        if self.device.type != "cuda":
            times = [time.perf_counter()]
            for _ in range(count):
                self.run()
                times.append(time.perf_counter())
            return [(b - a) * 1e3 for a, b in zip(times, times[1:])]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.run()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(events, events[1:])]

    def measure(self):
        self.marks(self.options.warmup)  # the first step compiles the model
        return self.marks(self.options.steps)


if __name__ == "__main__":
    OPTIONS = types.SimpleNamespace(model=sys.argv[1], device=sys.argv[2], gelu="exact", batch_size=32,
                                    warmup=5, steps=20)
    STEPS = PyTorch(OPTIONS, "bf16", compiled=False, captured=True).measure()
    print(f"{statistics.median(STEPS):.2f} ms per step")
