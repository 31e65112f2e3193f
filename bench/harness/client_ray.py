"""Ray's part of client_training.py: a TorchTrainer whose workers are the ranks."""
from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any, Dict, List

import torch

from harness.client_jobs import PROBLEMS, Job, Record, ranks, train_loop

BENCH = str(pathlib.Path(__file__).resolve().parents[1])
PORT = 6399  # of Ray's head node, which has its own network in the experiment


def train(job: Job) -> Record:
    """Starts Ray, on separate hosts one node each, and trains. Rank 0 starts the trainer."""
    rank, world = ranks()
    address = os.environ["MASTER_ADDR"]
    apart = address != "127.0.0.1"
    store = torch.distributed.TCPStore(address, int(os.environ["MASTER_PORT"]), world, rank == 0,
                                       timedelta(minutes=10), wait_for_workers=False)
    # Ray's processes inherit this environment.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_TRAIN_V2_ENABLED="1",
                      RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="300",
                      RAY_AUTH_MODE="disabled",  # the hosts do not share Ray's token
                      PYTHONPATH=os.pathsep.join([BENCH, os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory(prefix="gw-ray-") as folder:  # a short name: it contains sockets
        if rank == 0:
            store.set("folder", folder)
        node: List[subprocess.Popen[bytes]] = []
        if apart:
            if rank > 0:
                store.wait(["head"])
            host = f"{address.rpartition('.')[0]}.{rank + 1}"
            node.append(_node(host, ["--head", f"--port={PORT}", f"--temp-dir={folder}",
                                     "--include-dashboard=false"]
                              if rank == 0 else [f"--address={address}:{PORT}"]))
        try:
            if rank == 0:
                _drive(job, world, folder, f"{address}:{PORT}" if apart else "", store)
            store.set(f"done {rank}", b"")
            store.wait([f"done {r}" for r in range(world)])
            record = Record()
            vars(record).update(torch.load(pathlib.Path(store.get("folder").decode(), f"record-{rank}.pt")))
            store.set(f"read {rank}", b"")
            if rank == 0:
                store.wait([f"read {r}" for r in range(world)])
            return record
        finally:
            for process in node:
                process.terminate()
                process.wait()


def _node(host: str, words: List[str]) -> "subprocess.Popen[bytes]":
    program = str(pathlib.Path(sys.executable).with_name("ray"))
    return subprocess.Popen([program, "start", "--block", f"--node-ip-address={host}", "--num-cpus=1",
                             "--object-store-memory=100000000", *words], stdout=subprocess.DEVNULL)


def _drive(job: Job, world: int, folder: str, address: str, store: Any) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    if address:
        _connect(address, world, store)
    else:
        ray.init(num_cpus=world, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=folder,
                 log_to_driver=False, logging_level="error")
    fields = {key: value for key, value in job._asdict().items() if key != "used"}
    trainer = TorchTrainer(
        _worker, train_loop_config={"job": fields, "folder": folder},
        scaling_config=ScalingConfig(num_workers=world, placement_strategy="SPREAD"),
        run_config=RunConfig(name="run", storage_path=folder,
                             failure_config=FailureConfig(max_failures=1 if job.resume else 0)))
    trainer.fit()
    ray.shutdown()


def _connect(address: str, world: int, store: Any) -> None:
    """Waits until every host has joined the cluster."""
    import ray
    deadline = time.monotonic() + 120
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
            break
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
    store.set("head", b"")
    while sum(node["Alive"] for node in ray.nodes()) < world:
        if time.monotonic() > deadline:
            raise ConnectionError(f"Ray has {ray.nodes()}, expected {world} nodes")
        time.sleep(0.5)


def _worker(config: Dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    from gradwire.torch import compress
    torch.set_num_threads(1)
    job, rank = Job(**config["job"]), ranks()[0]
    problem, record = PROBLEMS[job.problem](), Record()
    model = ray.train.torch.prepare_model(problem.network())
    optimizer = torch.optim.SGD(model.parameters(), problem.sgd, momentum=0.9)
    hook = compress(model, job.spec) if job.spec else None
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/checkpoint.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if hook is not None:
            hook.load_state_dict(saved["hook"])

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = problem.loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def save() -> None:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                  "hook": hook.state_dict() if hook is not None else {}}
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                torch.save(states, f"{folder}/checkpoint.pt")
            ray.train.report({}, ray.train.Checkpoint.from_directory(folder) if rank == 0 else None)

    def killed(epoch: int, number: int) -> None:
        if job.resume and not checkpoint and (epoch, number) == (1, 1):
            ray.train.get_all_reported_checkpoints()  # returns when Ray knows the checkpoint
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    train_loop(job._replace(resume=bool(checkpoint)), record, step, save, killed)
    torch.save(vars(record.end(model)), f"{config['folder']}/record-{rank}.pt")
