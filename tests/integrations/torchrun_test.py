#!/usr/bin/python3
"""Kills ranks and machines under torchrun, and checks that integrations/python/examples/restarts.py continues.

usage: torchrun_test.py SCENARIO      of SCENARIOS
"""
from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Callable, Dict, List, Optional

import launch

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "integrations/python/examples/restarts.py"
# A lost machine is detected after 15 s. The others then wait another second for its return.
WAIT_S = 120


class Agent:
    """torchrun on one machine, and the output of its ranks."""

    def __init__(self, options: List[str], arguments: List[str], script: pathlib.Path = EXAMPLE) -> None:
        # The ranks' output comes through this pipe, because torchrun can split a line while it copies a file.
        # Redirects stderr, because Debian 12's torchrun crashes with its default.
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "-r", "2", "-t", "2", "--max_restarts", "3",
                "--monitor_interval", "0.2", *options,
                str(script), *arguments
            ], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env={
                **os.environ, "OMP_NUM_THREADS": "1", "GRADWIRE_THREADS": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
            })
        self.lines: List[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))

    def found(self, pattern: str) -> List["re.Match[str]"]:
        """Returns the pattern's matches in the output so far.

        Another rank's line may follow on the same line, because a rank writes a line and its newline
        separately (torchrun runs `python -u`).
        """
        return list(re.finditer(pattern, "\n".join(self.lines)))

    def processes(self) -> Dict[int, int]:
        """Returns the process of each rank since the last start."""
        return {int(m[1]): int(m[2]) for m in self.found(r"rank (\d+) of \d+ is process (\d+)")}

    def kill(self) -> None:
        """Kills the agent and all of its ranks, like the loss of a machine."""
        self._process.kill()
        for process in self.processes().values():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def wait(self) -> Optional[int]:
        try:
            code = self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(10)
        return code

    def end(self) -> None:
        if self._process.poll() is None:
            self.kill()


def wait_until(what: Callable[[], bool], agents: List[Agent], text: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        if time.monotonic() > deadline:
            raise SystemExit("\n".join(
                [f"FAILED: {text} did not come", *(line for a in agents for line in a.lines)]))
        time.sleep(0.05)


def check(condition: bool, text: str, agents: List[Agent]) -> None:
    if not condition:
        raise SystemExit("\n".join([f"FAILED: {text}", *(line for a in agents for line in a.lines)]))


def losses(agent: Agent) -> Dict[int, float]:
    return {int(m[1]): float(m[2])
            for m in agent.found(r"step (\d+) of \d+, \d+ ranks, loss (-?[\d.]+|nan|inf)")}


def begins(agent: Agent) -> List[int]:
    """Returns the step at which rank 0 began, for each start."""
    return [int(m[1]) for m in agent.found(r"rank 0 of \d+ is process \d+ and begins at step (\d+)")]


def same_weights(agent: Agent, steps: int, world: int) -> str:
    done = agent.found(rf"done: {steps} steps, {world} ranks, weights ([0-9a-f]{{8}}(?:, [0-9a-f]{{8}})*)")
    check(len(done) == 1, f"no end after {steps} steps with {world} ranks", [agent])
    weights = done[0][1].split(", ")
    check(len(weights) == world and len(set(weights)) == 1, f"weights differ: {weights}", [agent])
    return weights[0]


def run_of(folder: pathlib.Path, spec: str, victim: Optional[int],
           pause_s: float = 0.15) -> "tuple[Dict[int, float], str]":
    """Runs 40 steps on 3 ranks, and kills `victim` once. Returns the losses by step, and the weights.

    The weights must be equal on all ranks.

    pause_s: the pause between steps of a run with a victim, so that the kill precedes step 40.
    """
    steps, world = 40, 3
    agent = Agent(["--standalone", "--nproc_per_node", str(world)], [
        "--folder",
        str(folder), "--spec", spec, "--steps",
        str(steps), "--pause-s",
        str(pause_s if victim is not None else 0)
    ])
    try:
        if victim is not None:
            wait_until(lambda: max(losses(agent), default=0) >= 14, [agent], "step 14")
            try:
                os.kill(agent.processes()[victim], signal.SIGKILL)
            except ProcessLookupError:  # on a busy machine the run may have ended
                check(pause_s < 2, "the run ends before its rank can be killed", [agent])
                agent.end()
                return run_of(folder.with_name(f"{folder.name} again"), spec, victim, 4 * pause_s)
        check(agent.wait() == 0, "torchrun failed", [agent])
    finally:
        agent.end()
    # The run restarts from a checkpoint of step 10 or, if the kill was late, of step 20 or 30.
    started = begins(agent)
    check(started == [0] if victim is None else len(started) == 2 and started[1] in (10, 20, 30),
          f"starts: {started}", [agent])
    found, weights = losses(agent), same_weights(agent, steps, world)
    check(sorted(found) == list(range(steps)), f"steps {sorted(found)}", [agent])
    print(f"{spec}, rank {victim} killed: starts at {started}, {steps} steps, all ranks have the weights"
          f" {weights}", flush=True)
    return found, weights


def a_killed_rank(folder: pathlib.Path) -> None:
    spec = "fp32:schedule=two_shot"
    check(run_of(folder / "killed", spec, 1) == run_of(folder / "undisturbed", spec, None),
          "losses and weights differ", [])
    run_of(folder / "int8", "int8", 0)


def machine(port: int, is_first: bool, last_call_s: int) -> List[str]:
    """Returns torchrun's options for one of at most two machines, with two ranks each.

    The first machine has torchrun's store, and waits for the other machine.
    """
    return ["--nnodes", "1:2", "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint",
            f"localhost:{port}", "--rdzv_id", "restarts", "--rdzv_conf",
            f"last_call_timeout={last_call_s},join_timeout=100,keep_alive_interval=1,is_host={int(is_first)}"]


def a_lost_machine_is_gone_on_without(_: pathlib.Path) -> None:
    """Checks that min_ranks continues without a restart when another machine is lost."""
    port, script = launch.free_port(), pathlib.Path(__file__).with_name("torchrun_ranks.py")
    agents = [Agent(machine(port, first, 10), [], script) for first in (True, False)]
    try:
        wait_until(lambda: all(a.found("step 5 of 200, 4 ranks") for a in agents), agents,
                   "a start with both machines")
        agents[1].kill()
        # torchrun then waits five minutes for the ranks of the other machine.
        wait_until(lambda: len(agents[0].found("done: 200 steps")) == 2, agents, "the end")
    finally:
        for agent in agents:
            agent.end()
    check(len(agents[0].found(r"rank \d of 4 is process")) == 2 and not agents[0].found("of 2 is process"),
          "it was restarted", agents)
    check(
        len(agents[0].found("step 199 of 200, 2 ranks")) == 2, "the two that were left did not do all steps",
        agents)
    print("4 ranks, of which a machine with 2 was lost: the others did all steps without a restart")


def machines_that_come_and_go(folder: pathlib.Path) -> None:
    steps, port = 400, launch.free_port()
    arguments = ["--folder", str(folder), "--steps", str(steps), "--pause-s", "0.05"]
    agents = [Agent(machine(port, True, 1), arguments)]
    try:
        wait_until(lambda: len(agents[0].processes()) == 2, agents, "the first machine")
        agents.append(Agent(machine(port, False, 1), arguments))

        def steps_of(world: int, since: int) -> int:
            return sum(1 for a in agents for m in a.found(rf"step (\d+) of \d+, {world} ranks")
                       if int(m[1]) >= since)

        def last() -> int:
            return max((int(m[1]) for a in agents for m in a.found(r"step (\d+) of ")), default=0)

        wait_until(lambda: steps_of(4, 0) >= 15, agents, "a start with both machines")
        agents[1].kill()
        since = last() + 1
        wait_until(lambda: steps_of(2, since) >= 15, agents, "a start with one machine")
        agents.append(Agent(machine(port, False, 1), arguments))
        since = last() + 1
        wait_until(lambda: steps_of(4, since) >= 15, agents, "a start with both machines again")
        check(agents[0].wait() == 0 and agents[2].wait() == 0, "torchrun failed", agents)
    finally:
        for agent in agents:
            agent.end()
    ending = [a for a in agents if a.found("done: ")]
    check(len(ending) == 1, "no agent came to the end", agents)
    weights = same_weights(ending[0], steps, 4)
    done = {step for a in agents for step in losses(a)}
    check(done == set(range(steps)), f"steps are missing: {sorted(set(range(steps)) - done)}", agents)
    print(f"2, 4, 2 and 4 ranks: {steps} steps, all ranks have the weights {weights}")


SCENARIOS = [a_killed_rank, machines_that_come_and_go, a_lost_machine_is_gone_on_without]


def main() -> int:
    if obstacle := launch.torchrun_obstacle():
        print(f"SKIPPED: {obstacle}")
        return 77
    scenario = next(s for s in SCENARIOS if s.__name__ == sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="gradwire-torchrun-") as folder:
        scenario(pathlib.Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
