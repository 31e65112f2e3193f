"""PyTorch's communication hooks, driven by `gradwire-bench hook --baseline`: a world of 1, without DDP.

argv[1] is JSON: {"device", "threads", "shapes", "data": file of float32 in the order of shapes}. Reads
one command per line from stdin and answers with one line of JSON on stdout:
    prepare SPEC   SPEC is JSON: {"method": "powersgd", "rank", "error_feedback", "warm", "min_ratio"},
                   {"method": "bf16"} or {"method": "qr"}
                   -> {"baseline": description}
    run            -> {"ms": time of one call of the hook on a bucket with the data; for "qr", time to factor
                   all tensors}
"""
import json
import os
import shutil
import sys
import tempfile
import time


def answer(**fields):
    print(json.dumps(fields), flush=True)


try:
    import numpy
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
except ImportError as error:
    answer(missing=str(error))
    sys.exit(0)


class Bucket:
    """The argument of a hook in DDP: one flat buffer, and tensors as views of the buffer."""

    def __init__(self, buffer, shapes):
        self._buffer, self._gradients, begin = buffer, [], 0
        for shape in shapes:
            count = int(numpy.prod(shape))
            self._gradients.append(buffer[begin:begin + count].view(shape))
            begin += count
        assert begin == buffer.numel()

    def buffer(self):
        return self._buffer

    def gradients(self):
        return self._gradients

    def index(self):
        return 0

    def is_last(self):
        return True


class DoneAtOnce:
    """Replaces an allreduce that the backend lacks for BF16. In a world of 1 the replacement does nothing."""

    def __init__(self, tensor, *_, **__):
        self._future = torch.futures.Future()
        self._future.set_result([tensor])

    def get_future(self):
        return self._future


class Baseline:
    START = 2  # the earliest step at which PyTorch's PowerSGD may begin

    def __init__(self, config):
        self.device = torch.device(config["device"])
        torch.set_num_threads(config["threads"])
        self.data = torch.from_numpy(numpy.fromfile(config["data"], numpy.float32)).to(self.device)
        self.bucket = Bucket(torch.empty_like(self.data), config["shapes"])
        self.all_reduce = dist.all_reduce
        self.hook = self.state = None

    def prepare(self, spec):
        self.state, dist.all_reduce = None, self.all_reduce
        name = f"torch {torch.__version__} "
        if spec["method"] == "powersgd":
            self.hook = powerSGD_hook.powerSGD_hook
            self.state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=spec["rank"], start_powerSGD_iter=self.START,
                min_compression_rate=spec["min_ratio"], use_error_feedback=spec["error_feedback"],
                warm_start=spec["warm"], random_seed=0)
            name += f"powerSGD_hook rank {spec['rank']}"
        elif spec["method"] == "qr":
            groups = {}
            self.bucket.buffer().copy_(self.data)
            for matrix in self.bucket.gradients():
                groups.setdefault(tuple(matrix.shape), []).append(matrix)
            # Batching by shape is not timed, which favors PyTorch: a real hook must do it.
            batches = [torch.stack(group) for group in groups.values()]
            self.hook = lambda state, bucket: self.factor(batches)
            name += "linalg.qr, batched by shape"
        else:
            self.hook = default_hooks.bf16_compress_hook
            name += "bf16_compress_hook"
            try:
                dist.all_reduce(torch.ones(1, dtype=torch.bfloat16, device=self.device))
            except RuntimeError:
                dist.all_reduce = DoneAtOnce
                name += " without its allreduce"
        for _ in range(self.START + 2):
            self.run()
        return name

    @staticmethod
    def factor(batches):
        for batch in batches:
            torch.linalg.qr(batch)
        done = torch.futures.Future()
        done.set_result(None)
        return done

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self):
        self.bucket.buffer().copy_(self.data)
        self.synchronize()
        start = time.perf_counter()
        future = self.hook(self.state, self.bucket)
        future.wait()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3


def main():
    config = json.loads(sys.argv[1])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    folder = tempfile.mkdtemp(prefix="gradwire-baseline-")
    try:
        dist.init_process_group("gloo" if config["device"] == "cpu" else "nccl",
                                init_method=f"file://{folder}/store", rank=0, world_size=1)
        baseline = Baseline(config)
        answer(torch=torch.__version__)
        for line in sys.stdin:
            command, _, argument = line.strip().partition(" ")
            if command == "prepare":
                answer(baseline=baseline.prepare(json.loads(argument)))
            elif command == "run":
                answer(ms=baseline.run())
        dist.destroy_process_group()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
