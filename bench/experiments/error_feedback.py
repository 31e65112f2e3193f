"""Why error feedback costs accuracy in short runs: an MLP or ResNet on Fashion-MNIST, one factor changed at a time.

Simulates the ranks, the codecs and the reduction in PyTorch, so that each factor can change alone: learning
rate, number of steps, the second encode of a two-shot, Adam's second moment, momentum, decay, EF21, selection
by tensor, dense first steps, delay without compression, model. Takes more than an hour on one core; skips runs that
the result has already. run.py error_feedback --render FILE draws the picture of docs/results/formats.md.
"""
import collections
import dataclasses
import gzip
import math
import pathlib
import statistics

from harness import report

MODULES = ("torch",)
RESUMES = True
OPTIONS = {"seeds": 3, "data": "/usr/share/datasets/fashion-mnist", "only": "",
           "simulated_ranks": 4, "batch": 64}
SMOKE = {"seeds": 1, "only": "smoke"}
SIZES = (784, 256, 128, 10)
BLOCK = 4096
RATES = {"adamw": 2e-3, "sgd": 5e-2}
OTHER_RATES = {"adamw": (0.5, 2, 4), "sgd": (0.25, 2, 4)}
DELAYS = (2, 5, 10, 50)
CODECS = ("topk", "sign", "randk10")
NO_MOMENTUM = {"optimizer": "sgd", "momentum": 0.0, "rate": 10}


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings of a run. rate: times RATES. second_moment: "dense" feeds Adam's with exact gradients.
    codec "delayN": exact gradients, N steps late."""
    codec: str = "fp32"
    ef: str = "on"  # on, off, ef21
    optimizer: str = "adamw"
    rate: float = 1.0
    steps: int = 468
    second_encode: bool = True
    second_moment: str = "compressed"
    momentum: float = 0.9  # also AdamW's beta1
    decay: float = 1.0
    whole_tensors: bool = False
    dense_steps: int = 0
    flush: bool = False
    model: str = "mlp"  # or resnet


def pairs(codecs=CODECS, **changes):
    """Returns the runs of each codec with and without error feedback, with these changes."""
    return [Run(codec, ef, **changes) for codec in codecs for ef in ("on", "off")]


def with_feedback(**changes):
    return [Run(codec, "on", **changes) for codec in CODECS]


def questions():
    """Returns {question: runs}."""
    found = {}
    for optimizer in RATES:
        add = {"optimizer": optimizer}
        more = {
            "as it is": [Run(**add), *pairs(**add), Run("randk1", **add), Run("randk1", "off", **add)],
            "no second encode": [run for run in pairs(second_encode=False, **add)
                                 if not run.codec.startswith("randk")],
            "the first 100 steps dense": with_feedback(dense_steps=100, **add),
            "decay of 0.9": with_feedback(decay=0.9, **add),
            "EF21": [Run(codec, "ef21", **add) for codec in CODECS],
            "residual applied at the end": with_feedback(flush=True, **add),
            "exact gradients, late": [*(Run(f"delay{n}", **add) for n in DELAYS),
                                      Run("delay10", rate=0.25, **add)],
            "a ResNet": [Run(model="resnet", **add), *pairs(model="resnet", **add)],
            "selection by tensor": [Run("topk", ef, whole_tensors=True, **add) for ef in ("on", "off")],
        }
        if optimizer == "adamw":
            more["second moment of exact gradients"] = pairs(second_moment="dense", **add)
            more["no first moment (beta1 = 0)"] = [Run(momentum=0.0, **add), *pairs(momentum=0.0, **add)]
            more["a ResNet, beta1 = 0"] = [
                Run(model="resnet", momentum=0.0, **add), *pairs(model="resnet", momentum=0.0, **add)]
            more["both, and one encode"] = [
                run for run in with_feedback(momentum=0.0, second_moment="dense", second_encode=False, **add)
                if not run.codec.startswith("randk")]
        else:
            more["no momentum, ten times the rate"] = [Run(**NO_MOMENTUM), *pairs(**NO_MOMENTUM)]
            more["a ResNet, no momentum, ten times the rate"] = [
                Run(model="resnet", **NO_MOMENTUM), *pairs(model="resnet", **NO_MOMENTUM)]
        found.update({f"{optimizer}: {name}": runs for name, runs in more.items()})
    for optimizer, rates in OTHER_RATES.items():
        found[f"rate of {optimizer}"] = [run for rate in rates for run in (
            Run(optimizer=optimizer, rate=rate), *pairs(optimizer=optimizer, rate=rate))]
        found[f"ten times the steps of {optimizer}"] = [
            Run(optimizer=optimizer, steps=4680), *pairs(("topk",), optimizer=optimizer, steps=4680)]
    found["ten times the steps without momentum"] = [
        Run(**NO_MOMENTUM, steps=4680), *with_feedback(**NO_MOMENTUM, steps=4680)[:1]]
    return found


def load(folder):
    import torch

    def read(name, header, shape):
        data = gzip.decompress((pathlib.Path(folder) / f"{name}.gz").read_bytes())[header:]
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)

    sets = []
    for part in ("train", "t10k"):
        images = read(f"{part}-images-idx3-ubyte", 16, (-1, SIZES[0])).float()
        sets.append(((images / 255 - 0.286) / 0.353, read(f"{part}-labels-idx1-ubyte", 8, (-1,)).long()))
    return sets


class Codec:
    """Encodes and decodes rows of BLOCK values: (..., n) -> (..., n)."""

    def __init__(self, run, seed):
        import torch
        self.run, self.torch = run, torch
        self.generator = torch.Generator().manual_seed(1000 + seed)

    def shared(self, n):
        """Returns what all ranks share in a step: random-k's coordinates."""
        if not self.run.codec.startswith("randk"):
            return None
        ratio = int(self.run.codec[5:]) / 100
        return (self.torch.rand(n, generator=self.generator) < ratio).float()

    def __call__(self, values, mask):
        torch, codec = self.torch, self.run.codec
        if codec.startswith("randk"):
            return values * mask
        n = values.shape[-1]
        block = n if self.run.whole_tensors else min(BLOCK, n)
        padded = torch.nn.functional.pad(values, (0, -n % block))
        blocks = padded.reshape(*values.shape[:-1], -1, block)
        if codec == "sign":
            out = torch.sign(blocks) * blocks.abs().mean(-1, keepdim=True)
        else:
            at = blocks.abs().topk(max(1, block // 100), sorted=False).indices
            out = torch.zeros_like(blocks).scatter_(-1, at, blocks.gather(-1, at))
        return out.reshape(padded.shape)[..., :n]


class Reduction:
    """Averages gradients (ranks, n) of a matrix over the ranks, as a two-shot does, with error feedback."""

    def __init__(self, run, codec, ranks, n):
        import torch
        self.run, self.codec = run, codec
        self.residual, self.owner = torch.zeros(ranks, n), torch.zeros(n)
        self.estimates, self.mean = torch.zeros(ranks, n), torch.zeros(n)  # of EF21
        delay = int(run.codec[5:]) if run.codec.startswith("delay") else 0
        self.late = collections.deque(maxlen=delay + 1)

    def __call__(self, gradients):
        run = self.run
        if run.codec.startswith("delay"):
            self.late.append(gradients.mean(0))
            return self.late[0]
        mask = self.codec.shared(gradients.shape[-1])
        if run.ef == "ef21":
            sent = self.codec(gradients - self.estimates, mask)
            self.estimates += sent
            self.mean += sent.mean(0)
            return self.mean.clone()
        inputs = gradients + run.decay * self.residual if run.ef == "on" else gradients
        sent = self.codec(inputs, mask)
        if run.ef == "on":
            self.residual = inputs - sent
        average = sent.mean(0)
        if not run.second_encode or run.codec.startswith("randk"):
            return average
        whole = average + run.decay * self.owner if run.ef == "on" else average
        out = self.codec(whole, mask)
        if run.ef == "on":
            self.owner = whole - out
        return out

    def rest(self):
        """Returns the residuals' average over the ranks."""
        return self.residual.mean(0) + self.owner


class Optimizer:
    """AdamW without weight decay, or SGD with momentum; warm-up of 5 % of the steps, then cosine."""

    def __init__(self, run, parameters):
        import torch
        self.run, self.t = run, 0
        self.state = [[torch.zeros_like(p), torch.zeros_like(p)] for p in parameters]
        self.rate = RATES[run.optimizer] * run.rate

    def begin(self):
        self.t += 1
        warmup = max(1, self.run.steps // 20)
        scale = min(1.0, self.t / warmup)
        if self.t > warmup:
            scale = 0.5 * (1 + math.cos(math.pi * (self.t - warmup) / max(1, self.run.steps - warmup)))
        self.now = self.rate * scale

    def update(self, i, parameter, gradient, exact):
        first, second = self.state[i]
        if self.run.optimizer == "sgd":
            first.mul_(self.run.momentum).add_(gradient)
            parameter.sub_(self.now * first)
            return
        source = exact if self.run.second_moment == "dense" else gradient
        beta1 = self.run.momentum
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(0.999).addcmul_(source, source, value=0.001)
        root = (second / (1 - 0.999 ** self.t)).sqrt_().add_(1e-8)
        parameter.sub_(self.now * (first / (1 - beta1 ** self.t)) / root)


class Mlp:
    """Three layers; parameters are weights and biases in turn."""

    @staticmethod
    def initial(generator):
        import torch
        parameters = []
        for inner, outer in zip(SIZES, SIZES[1:]):
            parameters.append(torch.randn(outer, inner, generator=generator) * math.sqrt(2 / inner))
            parameters.append(torch.zeros(outer))
        return parameters

    @staticmethod
    def logits(parameters, images):
        """parameters with a dimension of ranks in front; images: (ranks, batch, 784)."""
        import torch
        x = images
        for i in range(0, len(parameters), 2):
            x = torch.baddbmm(parameters[i + 1].unsqueeze(1), x, parameters[i].transpose(1, 2))
            x = torch.relu(x) if i + 2 < len(parameters) else x
        return x


class ResNet:
    """Convolutions of 3 x 3 with biases, two residual blocks, no normalization."""

    CHANNELS = ((1, 16), (16, 16), (16, 16), (16, 32), (32, 32), (32, 32))

    @classmethod
    def initial(cls, generator):
        import torch
        parameters = []
        for inner, outer in cls.CHANNELS:
            scale = math.sqrt(2 / (9 * inner))
            parameters.append(torch.randn(outer, inner, 3, 3, generator=generator) * scale)
            parameters.append(torch.zeros(outer))
        return [*parameters, torch.randn(10, 32, generator=generator) * math.sqrt(1 / 32), torch.zeros(10)]

    @classmethod
    def logits(cls, parameters, images):
        """As Mlp.logits; the ranks one after the other."""
        import torch
        from torch.nn import functional
        out = []
        for rank, x in enumerate(images):
            mine = [p[rank] for p in parameters]

            def layer(x, i, stride=1):
                return functional.conv2d(x, mine[2 * i], mine[2 * i + 1], stride=stride, padding=1)
            x = torch.relu(layer(x.reshape(-1, 1, 28, 28), 0, 2))
            x = torch.relu(x + layer(torch.relu(layer(x, 1)), 2))
            x = torch.relu(layer(x, 3, 2))
            x = torch.relu(x + layer(torch.relu(layer(x, 4)), 5))
            out.append(functional.linear(x.mean((2, 3)), mine[-2], mine[-1]))
        return torch.stack(out)


MODELS = {"mlp": Mlp, "resnet": ResNet}


def average(run, step, reductions, i, gradients):
    """Returns the exact average and the reduced one. Vectors stay dense, as with dense=auto."""
    exact = gradients.mean(0)
    if run.codec == "fp32" or i not in reductions or step < run.dense_steps:
        return exact, exact
    return exact, reductions[i](gradients.reshape(len(gradients), -1)).reshape(exact.shape)


def accuracy(model, parameters, images, labels):
    logits = model.logits([p.unsqueeze(0) for p in parameters], images.unsqueeze(0))[0]
    return (logits.argmax(-1) == labels).float().mean().item()


def train(run, seed, sets, ranks, batch):
    """Returns the test accuracy, the last losses' mean and the residual's norm over the gradient's."""
    import torch
    (images, labels), test = sets
    model, generator = MODELS[run.model], torch.Generator().manual_seed(seed)
    parameters = model.initial(generator)
    codec = Codec(run, seed)
    reductions = {i: Reduction(run, codec, ranks, p.numel()) for i, p in enumerate(parameters) if p.dim() > 1}
    optimizer = Optimizer(run, parameters)
    order, losses, ratio = torch.empty(0, dtype=torch.long), [], 0.0
    for step in range(run.steps):
        if len(order) < ranks * batch:
            order = torch.randperm(len(images), generator=generator)
        chosen, order = order[:ranks * batch], order[ranks * batch:]
        leaves = [p.expand(ranks, *p.shape).clone().requires_grad_() for p in parameters]
        logits = model.logits(leaves, images[chosen].reshape(ranks, batch, -1))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[chosen])
        (loss * ranks).backward()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.begin()
        for i, parameter in enumerate(parameters):
            exact, reduced = average(run, step, reductions, i, leaves[i].grad)
            optimizer.update(i, parameter, reduced, exact)
        if step == run.steps - 1:
            norms = [(reductions[i].rest().norm(), leaves[i].grad.mean(0).norm()) for i in reductions]
            ratio = math.sqrt(sum(r * r for r, _ in norms) / sum(g * g for _, g in norms))
    if run.flush:  # with the step that each entry's last gradients had, and a tenth of the first rate
        optimizer.now = optimizer.rate / 10
        for i, reduction in reductions.items():
            rest = reduction.rest().reshape(parameters[i].shape)
            optimizer.t += 1
            optimizer.update(i, parameters[i], rest, rest)
    return {"test_accuracy": accuracy(model, parameters, *test), "loss": statistics.mean(losses[-20:]),
            "residual": float(ratio)}


def measure(options):
    import torch
    torch.set_num_threads(1)
    if options.smoke:
        sets = [(torch.randn(64, SIZES[0]), torch.randint(0, 10, (64,))) for _ in range(2)]
        for runs in questions().values():
            run = dataclasses.replace(runs[0], steps=2, dense_steps=min(1, runs[0].dense_steps))
            yield {**dataclasses.asdict(run), "seed": 0, **train(run, 0, sets, 2, 8)}
        return
    sets = load(options.data)
    done = {(tuple(item[f.name] for f in dataclasses.fields(Run)), item["seed"]) for item in options.done}
    for seed in range(options.seeds):
        for question, runs in questions().items():
            if options.only and options.only not in question:
                continue
            for run in runs:
                key = (dataclasses.astuple(run), seed)
                if key in done:
                    continue
                done.add(key)
                yield {**dataclasses.asdict(run), "seed": seed,
                       **train(run, seed, sets, options.simulated_ranks, options.batch)}


def line(item):
    base = dataclasses.asdict(Run())
    changed = " ".join(f"{k}={item[k]}" for k in base if item[k] != base[k])
    return (f"seed {item['seed']}, {changed or 'fp32'}: {100 * item['test_accuracy']:.2f} %, loss "
            f"{item['loss']:.3f}, residual {item['residual']:.1f}")


def found(items, run):
    """Returns the test accuracies of a run in percent, one per seed."""
    wanted = dataclasses.asdict(run)
    return [100 * item["test_accuracy"] for item in items if all(item[k] == wanted[k] for k in wanted)]


def cell(items, run):
    """Returns "mean±deviation" over the seeds of a run; "-" without a result."""
    values = found(items, run)
    if not values:
        return "-"
    return f"{statistics.mean(values):.1f}" + (f"±{statistics.stdev(values):.1f}" if len(values) > 1 else "")


def both(items, runs, codec):
    """Returns the cells with and without error feedback of a codec's runs."""
    chosen = [next((run for run in runs if run.codec == codec and run.ef in ef), None)
              for ef in (("on", "ef21"), ("off",))]
    cells = [cell(items, run) if run else "-" for run in chosen]
    return " / ".join(cells) if chosen[1] else cells[0]


def tables(document):
    """Returns the table of the factors, with and without error feedback, and that of the rates."""
    items, asked = document["items"], questions()
    factors = dict.fromkeys(name.split(": ")[1] for name in asked if ": " in name and "late" not in name)
    rows = [["changed", *(f"{codec}, {optimizer}" for codec in CODECS for optimizer in RATES)]]
    for name in factors:
        rows.append([name, *(both(items, asked.get(f"{optimizer}: {name}", []), codec)
                             for codec in CODECS for optimizer in RATES)])
    out = [report.markdown(rows)]
    rows = [["", *(f"late by {n}" for n in DELAYS), "late by 10, rate / 4", "fp32", "randk1",
             "ten times the steps: fp32, topk"]]
    for optimizer in RATES:
        long = asked[f"ten times the steps of {optimizer}"]
        rows.append([optimizer, *(cell(items, Run(f"delay{n}", optimizer=optimizer)) for n in DELAYS),
                     cell(items, Run("delay10", optimizer=optimizer, rate=0.25)),
                     cell(items, Run(optimizer=optimizer)),
                     both(items, asked[f"{optimizer}: as it is"], "randk1"),
                     ", ".join([cell(items, long[0]), both(items, long, "topk")])])
    out.append(report.markdown(rows))
    for optimizer in RATES:
        rates = sorted({1.0, *OTHER_RATES[optimizer]})
        rows = [[f"{optimizer}, rate", *(f"{rate * RATES[optimizer]:g}" for rate in rates)],
                ["fp32", *(cell(items, Run(optimizer=optimizer, rate=rate)) for rate in rates)]]
        for codec in CODECS:
            rows.append([codec, *(both(items, pairs((codec,), optimizer=optimizer, rate=rate), codec)
                                  for rate in rates)])
        out.append(report.markdown(rows))
    return "\n\n".join(out)


def render(document, path, options):
    """Draws the picture of docs/results/formats.md: factors and rates of top-k."""
    from plots import experiments
    items, asked, panels = document["items"], questions(), []
    for optimizer in RATES:
        rows = []
        for name, runs in asked.items():
            if name.startswith(optimizer) and "late" not in name and "ResNet" not in name:
                chosen = [run for run in runs if run.codec == "topk"]
                rows.append((name.split(": ")[1], *([v for run in chosen if (run.ef == "off") == off
                                                     for v in found(items, run)] for off in (False, True))))
        rates = sorted({1.0, *OTHER_RATES[optimizer]})
        lines = {name: [(rate * RATES[optimizer], found(items, Run(*run, optimizer, rate))) for rate in rates]
                 for name, run in (("FP32", ("fp32", "on")), ("with", ("topk", "on")),
                                   ("without", ("topk", "off")))}
        panels.append((optimizer, rows, lines))
    experiments.draw_error_feedback(panels, report.PAGE.parent / "error-feedback.png")
