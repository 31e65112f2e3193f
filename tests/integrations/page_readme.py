"""The commands of README.md."""
from __future__ import annotations

import pathlib
import subprocess
import tempfile
from typing import Dict, List

from page_sessions import Session

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Replaces long commands: a run of 3 epochs takes a minute. The page omits a comparison's model.
SHORTER: Dict[str, str] = {
    "--epochs 3": "--steps 8",
    "compare ...": "compare --model vit_tiny --data fashion-mnist --ranks 2 --steps 4"
}


def commands(examples: List[str], build: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for example in examples:
            command = example.partition("#")[0].replace("build/bin/", f"{build}/bin/")
            for printed, shorter in SHORTER.items():
                command = command.replace(printed, shorter)
            done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True,
                                  timeout=120)
            print(f"$ {command}\n{done.stdout}", flush=True)
            assert done.returncode == 0, done.stderr
        written = [path.name for path in pathlib.Path(folder).iterdir()]
        assert {"result.json", "run.jsonl"} <= set(written), written


BENCH = "tests/bench_test.py and tests/bench_ranks_test.py run each command, over fewer sizes"
SESSIONS = {
    "commands": Session(0, commands, [
        "build/bin/gradwire train", "build/bin/gradwire compare ... --compression fp32",
        "build/bin/gradwire top"
    ])
}
NOT_RUN = [
    ("make demo", "trains for minutes; tests/demo_test.py runs its first steps"),
    ("Between threads", "the output of the command above; tests/demo_test.py compares it with the program"),
    ("build/bin/gradwire compare ... --compression shelf",
     "trains with every format; tests/cli/compare_test.py runs it on small models"),
    ("build/bin/gradwire report", "tests/cli/report_test.py runs it, where plotly is installed"),
    ("build/bin/gradwire doctor", "measures for half a minute; tests/cli/doctor_test.py runs it"),
    ("build/bin/gradwire plan", "reads a file of the source tree; tests/cli/plan_test.py runs it"),
    *((f"build/bin/gradwire-bench {command}", BENCH)
      for command in ("schedules", "numerics", "formats", "kernels", "hook", "collectives")),
]
