"""Starts the ranks of an experiment, and describes the machine and the commit."""
import functools
import os
import pathlib
import re
import signal
import socket
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPED_LINK = str(ROOT / "bench/harness/shaped_link.sh")
GRADWIRE = str(ROOT / "build/bin/gradwire")


def output_of(*command):
    """Returns a command's output; "" if the command fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


@functools.lru_cache(maxsize=None)
def commit():
    """Returns the commit, and whether files differ from the commit."""
    name = output_of("git", "rev-parse", "--short=12", "HEAD") or "unknown"
    return name + (", with changes" if output_of("git", "diff", "--name-only", "HEAD") else "")


def cpu():
    model = re.search(r"^model name\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.M)
    return model[1] if model else "unknown CPU"


def no_links():
    """Returns why this machine cannot run shaped_link.sh; "" if it can."""
    probe = subprocess.run([SHAPED_LINK, "--hosts", "2", "--", "true"], capture_output=True, text=True)
    lines = probe.stderr.strip().splitlines() or ["shaped_link.sh failed"]
    return "" if probe.returncode == 0 else lines[-1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(command, count, rate, deadline_s, environment=None):
    """Runs a command once per rank, with the variables of torchrun. Returns the largest exit status.

    Args:
        command: the words of the command.
        count: the number of ranks.
        rate: rate of the links between ranks on separate hosts, such as "1gbit". "": the ranks are
            processes of this machine.
        deadline_s: seconds after which the ranks are killed.
        environment: more variables for the ranks.
    """
    threads = str(max(1, (os.cpu_count() or 1) // count))
    base = {"GRADWIRE_THREADS": threads, "OMP_NUM_THREADS": threads, **os.environ, **(environment or {})}
    if rate:
        link = [SHAPED_LINK, "--hosts", str(count), "--rate", rate, "--"]
        processes = [subprocess.Popen([*link, *command], env=base, start_new_session=True)]
    else:
        base.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo")
        processes = [subprocess.Popen(command, env={**base, "RANK": str(r), "LOCAL_RANK": str(r)},
                                      start_new_session=True) for r in range(count)]
    return wait(processes, deadline_s)


def wait(processes, deadline_s):
    """Waits for processes with separate sessions; kills all at the deadline. Returns the largest status."""
    end = time.monotonic() + deadline_s
    try:
        return max(abs(process.wait(timeout=max(1, end - time.monotonic()))) for process in processes)
    except subprocess.TimeoutExpired:
        return 1
    finally:  # even after Ctrl-C: on SIGTERM shaped_link.sh removes its namespaces and their processes
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
