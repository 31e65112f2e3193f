"""A small allreduce with more ranks than cores: latency and CPU time of Gradwire and gloo, alternating."""
import os
import resource
import time

from harness import report

MODULES = ("torch",)
OPTIONS = {"ranks": 2 * len(os.sched_getaffinity(0)), "kib": 64, "repetitions": 5}
SMOKE = {"ranks": 2, "repetitions": 1, "rate": ""}
CALLS, WARM_UP_CALLS, PAUSE_S = 300, 20, 3


def cpu_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(options):
    import torch
    import torch.distributed as dist

    from gradwire.torch import communicator
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = communicator()
    values = torch.ones(options.kib * 256)
    calls = {"gloo": lambda: dist.all_reduce(values),
             "gradwire": lambda: comm.allreduce_(values, "fp32", "avg")}
    for _ in range(options.repetitions):
        for mode, call in calls.items():
            dist.barrier()
            for _ in range(WARM_UP_CALLS):
                call()
            times, before = [], cpu_s()
            for _ in range(CALLS):
                begin = time.perf_counter()
                call()
                times.append((time.perf_counter() - begin) * 1e3)
            yield {"mode": mode, "step_ms": times, "cpu_ms": (cpu_s() - before) / CALLS * 1e3}
    for mode, call in calls.items():  # rank 0 waits for the last rank, which pauses
        dist.barrier()
        before = cpu_s()
        if dist.get_rank() == options.ranks - 1:
            time.sleep(PAUSE_S)
        call()
        yield {"mode": mode, "waiting_cores": (cpu_s() - before) / PAUSE_S}
    dist.barrier()
    comm.close()
    dist.destroy_process_group()


def tables(document):
    waiting = {i["mode"]: i["waiting_cores"] for i in document["items"] if "waiting_cores" in i}
    rows = [["", "ms per call", "95 % of calls within, ms", "CPU ms per call", "cores while waiting"]]
    for mode, items in report.by_mode([i for i in document["items"] if "step_ms" in i]).items():
        rows.append([mode, f"{report.median(report.median(i['step_ms']) for i in items):.2f}",
                     f"{report.median(sorted(i['step_ms'])[int(0.95 * CALLS)] for i in items):.2f}",
                     f"{report.median(i['cpu_ms'] for i in items):.2f}", f"{waiting.get(mode, 0):.3f}"])
    return report.markdown(rows)
