"""Starts the ranks of an experiment, and describes the machine and the commit."""
import functools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPED_LINK = str(ROOT / "bench/harness/shaped_link.sh")
GRADWIRE = str(ROOT / "build/bin/gradwire")
TIMED_OUT = 124  # as of the program timeout
# Runs the command in $2... as a world of 1, whatever the launcher says, with the log $1.RANK.
ALONE = ('log=$1.$RANK; shift; unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT; '
         'exec "$@" --log "$log"')


class Failed(Exception):
    """The reason why a measurement failed."""


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


def run(command, count, rate, deadline_s, environment=None, output=None):
    """Runs a command once per rank, with the variables of torchrun. Returns the largest exit status.

    Args:
        command: the words of the command.
        count: the number of ranks.
        rate: rate of the links between ranks on separate hosts, such as "1gbit". "": the ranks are
            processes of this machine.
        deadline_s: seconds after which the ranks are killed.
        environment: more variables for the ranks.
        output: a file for the output of all ranks. None: the terminal.
    """
    threads = str(max(1, (os.cpu_count() or 1) // count))
    base = {"GRADWIRE_THREADS": threads, "OMP_NUM_THREADS": threads, **os.environ, **(environment or {})}
    links = [SHAPED_LINK, "--hosts", str(count), "--rate", rate, "--"] if rate else []
    if not rate:
        with socket.socket() as probe:  # finds a free port
            probe.bind(("127.0.0.1", 0))
            base.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1",
                        MASTER_PORT=str(probe.getsockname()[1]), GLOO_SOCKET_IFNAME="lo")
    processes = [subprocess.Popen([*links, *command], start_new_session=True, stdout=output, stderr=output,
                                  env={**base, **({} if rate else {"RANK": str(r), "LOCAL_RANK": str(r)})})
                 for r in range(1 if rate else count)]
    end = time.monotonic() + deadline_s
    try:
        return max(abs(process.wait(timeout=max(1, end - time.monotonic()))) for process in processes)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:  # even after Ctrl-C: on SIGTERM shaped_link.sh removes its namespaces and their processes
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def run_quietly(command, count, rate, deadline_s, environment=None):
    """Runs a command like run(). Raises Failed with the last line of the ranks' output if a rank fails."""
    with tempfile.TemporaryFile("w+") as output:
        code = run(command, count, rate, deadline_s, environment, output)
        if code == TIMED_OUT:
            raise Failed(f"did not finish within {deadline_s} s")
        if code:
            output.seek(0)
            raise Failed((output.read().strip().splitlines() or [f"exited with code {code}"])[-1][:200])


def train(flags, count=1, rate="", deadline_s=1800, environment=None, gradwire=GRADWIRE, alone=False):
    """Returns the records of `gradwire train`. Raises Failed if the training fails.

    Args:
        flags: flags of `gradwire train`; with a count of 1, --ranks starts threads.
        count, rate, deadline_s, environment: as for run().
        alone: each process is a world of 1.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-train-") as folder:
        log, command = f"{folder}/run.jsonl", [gradwire, "train", *map(str, flags)]
        command = ["sh", "-c", ALONE, "sh", log, *command] if alone else [*command, "--log", log]
        run_quietly(command, count, rate, deadline_s, environment)
        lines = pathlib.Path(log + (".0" if alone else "")).read_text().splitlines()
        return [json.loads(line) for line in lines]
