#!/usr/bin/env python3
"""Converts run logs, for `gradwire export`.

    export.py tensorboard DIR LOG...    writes event files: a folder of DIR for each log, with the log's name
    export.py csv - LOG...              returns a table: a row per step of each log, a column per number

Every number of a step or an evaluation becomes a scalar of TensorBoard at its step.
"""
import csv
import io
import pathlib
import sys

from read_results import deliver, fail, load, number

TAGS = {"loss": "train/loss", "lr": "train/lr", "test_loss": "test/loss", "test_accuracy": "test/accuracy",
        "wire_bytes": "sent/wire_bytes", "dense_bytes": "sent/dense_bytes"}
NOT_SCALARS = {"step", "epoch", "images"}


def writer_classes():
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        fail(f"export --tensorboard needs tensorboard, which {sys.executable} does not have; install it with "
             "pip, and name that Python in GRADWIRE_PYTHON", 1)
    return Event, Summary, EventFileWriter


def folders_of(directory, logs):
    """Returns each log's folder. Logs of one name are numbered."""
    folders = {}
    for log in logs:
        name, count = log.stem, 1
        while directory / name in folders.values():
            count += 1
            name = f"{log.stem}-{count}"
        folders[log] = directory / name
    for folder in folders.values():
        if any(folder.glob("events.out.tfevents.*")):
            fail(f"{folder}: contains event files already; remove them, or name another folder")
    return folders


def write_events(log, records, folder, classes):
    Event, Summary, EventFileWriter = classes
    seconds = sum((number(r.get("step_ms")) or 0) / 1000 for r in records if r.get("type") == "step")
    now = log.stat().st_mtime - seconds  # records have no clock: the log's last change is the end
    writer = EventFileWriter(str(folder))
    for record in records:
        kind = record.get("type")
        if kind not in ("step", "eval"):
            continue
        if kind == "step":
            now += (number(record.get("step_ms")) or 0) / 1000
        values = [Summary.Value(tag=TAGS.get(name, "step/" + name), simple_value=float(value))
                  for name, value in record.items() if name not in NOT_SCALARS and number(value) is not None]
        step = int(number(record.get("step")) or 0) + (kind == "step")
        writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=values)))
    writer.close()


def tensorboard(directory, loaded):
    classes = writer_classes()
    folders = folders_of(pathlib.Path(directory), loaded)
    for log, folder in folders.items():
        write_events(log, loaded[log], folder, classes)
    return "".join(f"TensorBoard: {folder}\n" for folder in folders.values())


def table(_, loaded):
    steps = [(log, r) for log, records in loaded.items() for r in records if r.get("type") == "step"]
    names = dict.fromkeys(name for _, step in steps for name, value in step.items()
                          if value is None or number(value) is not None)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["log", *names])
    writer.writerows([log, *(number(step.get(name)) for name in names)] for log, step in steps)
    return text.getvalue()


def main():
    kind, target, *logs = sys.argv[1:]
    loaded = {pathlib.Path(log): load(pathlib.Path(log)) for log in logs}
    for log, (what, *_) in loaded.items():
        if what != "log":
            fail(f"{log}: not a run log; give a file of gradwire train --log")
    formats = {"tensorboard": tensorboard, "csv": table}
    deliver(formats[kind](target, {log: records for log, (_, records) in loaded.items()}))


if __name__ == "__main__":
    try:
        main()
    except Exception as error:  # one line, like every error of the command
        fail(f"export: {type(error).__name__}: {error}", 1)
