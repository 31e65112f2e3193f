"""Runs on each host of bench/experiments/slow_links.py: carries out a plan together with the other hosts.

    slow_links_host.py PLAN.json      with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment

PLAN.json: {"folder": shared by the hosts, "gradwire": path, "python": of the baseline, "flags": [of gradwire
train], "baseline": argument of bench/baselines/pytorch_train.py, "items": [...]}. An item is one measurement,
by Gradwire (a process per item) or PyTorch (one process for all items, because importing takes longer
than a measurement). The items alternate, so that changes in the machine's speed affect both. Host 0 appends to
folder/results.jsonl: the item with "step_ms" and further fields, or with "error".
"""
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # bench/
from harness import report  # noqa: E402


class Failed(Exception):
    """The reason why a measurement failed."""


class Child:
    """PyTorch's process, which answers each command within a deadline."""

    def __init__(self, plan, serial):
        config = {**plan["baseline"], "rendezvous": f"{plan['folder']}/store.{serial}"}
        script = HERE.parent / "baselines" / "pytorch_train.py"
        log = f"{plan['folder']}/baseline.{os.environ['RANK']}.log"
        self.process = subprocess.Popen([plan["python"], "-W", "ignore", str(script), json.dumps(config)],
                                        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=open(log, "a"))
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()
        self.hello = {}

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def wait_for_answer(self, seconds):
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            raise Failed(f"PyTorch did not answer within {seconds} s") from None
        if line is None:
            raise Failed(f"PyTorch's process exited with code {self.process.wait()}")
        return json.loads(line)

    def ask(self, command, seconds):
        if not self.hello:
            self.hello = self.wait_for_answer(60)
            if "missing" in self.hello:
                raise Failed(f"no PyTorch: {self.hello['missing']}")
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        reply = self.wait_for_answer(seconds)
        if "error" in reply:
            raise Failed(reply["error"])
        return reply

    def stop(self):
        self.process.kill()
        self.process.wait()


class Host:
    def __init__(self, plan):
        self.plan, self.folder = plan, pathlib.Path(plan["folder"])
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.child, self.children, self.barriers = None, 0, 0

    def barrier(self, why="", seconds=90):
        """Waits for the other hosts. Returns the error of any host, or an empty text."""
        self.barriers += 1
        note = self.folder / f"note.{self.rank}"
        note.write_text(why)
        note.rename(self.folder / f"at.{self.barriers}.{self.rank}")
        deadline = time.monotonic() + seconds
        for other in range(self.world):
            path = self.folder / f"at.{self.barriers}.{other}"
            while not path.exists():
                if time.monotonic() > deadline:
                    raise SystemExit(f"experiments: host {other} did not arrive within {seconds} s")
                time.sleep(0.005)
            why = why or path.read_text()
        return why

    def gradwire(self, item, number):
        """One `gradwire train`: a rank per host, a world of 1 on each host, or all ranks in one process."""
        log = self.folder / f"{number}.{self.rank}.jsonl"
        command = [self.plan["gradwire"], "train", *self.plan["flags"], "--compression", item["spec"],
                   "--steps", str(item["warmup"] + item["steps"]), "--log", str(log), "--bucket-mb",
                   str(item["bucket_mb"] or report.ONE_BUCKET_MB), *item.get("flags", [])]
        env = dict(os.environ)
        if item["ranks_are"] == "hosts":
            # A port that was chosen beforehand could be another program's by now.
            command += ["--rendezvous", f"file://{self.folder}/meeting.{number}"]
        else:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                         "MASTER_PORT"):
                env.pop(name)
        if item["ranks_are"] == "threads":
            if self.rank != 0:
                return {}
            command += ["--ranks", str(self.world)]
            env.pop("GRADWIRE_THREADS")
        with subprocess.Popen(command, env=env, text=True, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE) as process:
            try:
                _, errors = process.communicate(timeout=item["deadline_s"])
            except subprocess.TimeoutExpired:
                process.kill()
                raise Failed(f"gradwire did not finish within {item['deadline_s']} s") from None
        if process.returncode != 0:
            raise Failed((errors.strip().splitlines()
                          or [f"gradwire exited with code {process.returncode}"])[-1])
        return report.read_log(log, item["warmup"]) if self.rank == 0 else {}

    def pytorch(self, item):
        if self.child is None:
            self.children += 1
            self.child = Child(self.plan, self.children)
        command = {key: item.get(key) for key in ("hook", "rank", "bucket_mb", "warmup", "steps")}
        return {**self.child.ask(command, item["deadline_s"]), **self.child.hello}

    def work(self, number, item):
        result, why = {}, ""
        self.barrier()
        try:
            result = self.gradwire(item, number) if item["who"] == "gradwire" else self.pytorch(item)
        except Failed as reason:
            why = str(reason)
        why = self.barrier(why, item["deadline_s"] + 90)
        if why:
            result = {"error": why}
            if item["who"] == "pytorch" and self.child is not None:
                self.child.stop()
                self.child = None
        if self.rank == 0:
            with open(self.folder / "results.jsonl", "a") as out:
                out.write(json.dumps({**item, **result}) + "\n")
            print(report.progress_line(number + 1, len(self.plan["items"]), item, result), flush=True)

    def run(self):
        try:
            for number, item in enumerate(self.plan["items"]):
                self.work(number, item)
        finally:
            if self.child is not None:
                self.child.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    Host(json.loads(pathlib.Path(sys.argv[1]).read_text())).run()
