"""Time for ranks to join, with and without a secret, alternating in one run."""
import contextlib
import os
import time

from harness import report

MODULES = ("numpy",)
OPTIONS = {"ranks": 16, "repetitions": 15}
SMOKE = {"ranks": 2, "repetitions": 1, "rate": ""}


def measure(options):
    import numpy as np

    import gradwire
    from gradwire._port import reserve_port
    rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    with gradwire.Communicator(f"tcp://{address}:{os.environ['MASTER_PORT']}", rank, options.ranks) as all_:
        for i in range(2 * options.repetitions):
            mode = ("with a secret", "without a secret")[i % 2]
            with contextlib.ExitStack() as stack:
                port = np.array([reserve_port(stack) if rank == 0 else 0], np.float32)
                all_.broadcast_(port)
                time.sleep(0.3)  # the processes of the last group become idle
                all_.allreduce_(np.zeros(1, np.float32))
                begin = time.perf_counter()
                group = gradwire.Communicator(f"tcp://{address}:{int(port[0])}", rank, options.ranks,
                                              secret="of this run alone" if mode == "with a secret" else "")
                times = np.zeros(options.ranks, np.float32)
                times[rank] = time.perf_counter() - begin
                all_.allreduce_(times, op="sum")
                group.close()
            yield {"mode": mode, "step_ms": [float(times.max()) * 1e3]}


def tables(document):
    return "Slowest rank:\n\n" + report.markdown(report.speed_table(document["items"], "without a secret"))
