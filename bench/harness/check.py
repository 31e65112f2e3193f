#!/usr/bin/env python3
"""Checks this build's speed against the goals and the published numbers, docs/results/baselines.jsonl.

    check.py run [--only REGEX] [--out FOLDER]   measures and checks the cases (make bench-check)
    check.py run --out B --against A             also compares each row with another build's results, in A
    check.py run --smoke                         measures tiny sizes; only a missing row is a failure
    check.py compare FOLDER                      checks existing results, STEP.json (scripts/host_check.sh)
    check.py publish FOLDER                      makes FOLDER's measurements the published values of its cases

Compares only ratios between measurements of one run, never times; higher is always better. A case fails when
it is below its goal, or below the published value on the same device, by more than its noise, or when its
row is missing in the results. A faster result never fails. With --against, a row fails that `gradwire-bench
compare` calls SLOWER twice. A is the --out of a run on this machine. Exit status: 0: no case failed; 1: a
case failed; 2: bad input.

baselines.jsonl has one case per line: {"case": name, "step": name of the command's results, "command": [...],
"where": fields of the row (the best of several counts), "metric": field or "field/field" of that row, "over":
fields of another row whose metric is divided by this one's (for times), "of": constant to divide by, "value",
"goal": or null, "noise": fraction, "commit", "device"}
"""
import argparse
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from harness import ranks, report, smoke  # noqa: E402

BASELINES = ROOT / "docs" / "results" / "baselines.jsonl"
DEADLINE_S = 300  # deadline of one command
REQUIRED = {"case", "step", "command", "where", "metric", "value", "goal", "noise", "commit", "device"}
OPTIONAL = {"over", "of"}
FAILING = ("NOT MET", "SLOWER", "NOT MEASURED")
MOST_ROWS_SHOWN = 8


class BadInput(Exception):
    pass


class NotMeasured(Exception):
    """The reason why a case has no measured ratio."""


def read_cases(path, only="."):
    """Returns the cases whose name matches."""
    try:
        wanted, lines = re.compile(only), pathlib.Path(path).read_text().splitlines()
    except re.error as error:
        raise BadInput(f"--only {only}: {error}") from None
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    cases = []
    for number, line in enumerate(lines, 1):
        try:
            case = json.loads(line)
        except ValueError as error:
            raise BadInput(f"{path}:{number}: not JSON: {error}") from None
        wrong = (REQUIRED - set(case)) | (set(case) - REQUIRED - OPTIONAL)
        if wrong:
            raise BadInput(f"{path}:{number}: missing or unknown: {', '.join(sorted(wrong))}")
        cases.append(case)
    commands = {}
    for case in cases:
        if commands.setdefault(case["step"], case["command"]) != case["command"]:
            raise BadInput(f"{path}: step {case['step']} has two commands; give each its own step")
    cases = [case for case in cases if wanted.search(case["case"])]
    if not cases:
        raise BadInput(f"--only {only}: no case in {path} has a name that matches")
    return cases


def existence_only(case):
    """Returns the case for a smoke run: only the case's row must exist, with the size of a smoke run."""
    changed = {"goal": None, "device": None}
    for key in ("where", "over"):
        if key in case:
            changed[key] = {
                **case[key], **({"size_bytes": smoke.SIZE_BYTES} if "size_bytes" in case[key] else {})}
    return {**case, **changed}


def field(row, metric):
    """Returns the metric of one row: a field, or a quotient of two."""
    values = [row.get(name) for name in metric.split("/")]
    for name, value in zip(metric.split("/"), values):
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise NotMeasured(f"{name} is {json.dumps(value)}")
    return values[0] if len(values) == 1 else values[0] / values[1]


def matching(rows, where):
    """Returns the rows with the fields `where`. If none exist, the error names the most similar rows."""
    def text(row):
        return ", ".join(f"{key}={row.get(key)}" for key in where)

    found = [row for row in rows if all(row.get(key) == value for key, value in where.items())]
    if not found:
        similar = sorted(rows, key=lambda row: -sum(row.get(key) == value for key, value in where.items()))
        names = list(dict.fromkeys(map(text, similar)))
        shown = "; ".join(names[:MOST_ROWS_SHOWN]) + (f"; {len(names) - MOST_ROWS_SHOWN} more"
                                                      if len(names) > MOST_ROWS_SHOWN else "")
        raise NotMeasured(f"no row with {text(where)}; the rows are: {shown or 'none'}")
    return found


def measured(case, rows):
    """Returns the case's ratio from the rows of its step. rows: None if the command failed."""
    if rows is None:
        raise NotMeasured("its command failed")
    values = [field(row, case["metric"]) for row in matching(rows, case["where"])]
    if "over" in case:
        return field(matching(rows, case["over"])[0], case["metric"]) / min(values)
    return max(values) / case.get("of", 1)


def least(case, device):
    """Returns the case's limits, the strictest first: (minimum without noise, verdict below the minimum)."""
    demands = [(case["goal"], "NOT MET")] if case["goal"] is not None else []
    if case["device"] == device:
        demands.append((case["value"], "SLOWER"))
    return sorted(demands, reverse=True)


def verdict_of(case, rows, device):
    """Returns the verdict on a case: {"case", "measured" or None, "verdict", "why"}."""
    try:
        value = measured(case, rows)
    except NotMeasured as reason:
        return {"case": case["case"], "measured": None, "verdict": "NOT MEASURED", "why": str(reason)}
    verdicts = [verdict for demand, verdict in least(case, device) if value < demand * (1 - case["noise"])]
    # Missing the goal is the more serious verdict.
    verdict = "NOT MET" if "NOT MET" in verdicts else verdicts[0] if verdicts else "ok"
    return {"case": case["case"], "measured": value, "verdict": verdict, "why": ""}


def better(first, second):
    """Returns the better of two verdicts on a case. Noise on a shared machine can only lower the ratio."""
    return max(first, second, key=lambda j: -1 if j["measured"] is None else j["measured"])


def table(cases, verdicts, device):
    rows = [["case", "measured", "goal", "published", "noise", ""]]
    for case, j in zip(cases, verdicts):
        published = f"{case['value']:.3g}" + ("" if case["device"] == device else " elsewhere")
        rows.append([case["case"], "-" if j["measured"] is None else f"{j['measured']:.3g}",
                     "-" if case["goal"] is None else f"{case['goal']:g}", published,
                     f"{100 * case['noise']:.0f} %", j["verdict"] + (f": {j['why']}" if j["why"] else "")])
    return rows


def device_name():
    return f"{ranks.cpu()}, {os.cpu_count()} cores"


class Runs:
    """The commands of the cases, with this build's gradwire-bench. `shrink` changes the words of each command."""

    def __init__(self, cases, build, folder, shrink=list):
        self.bench, self.folder = str(build / "bin/gradwire-bench"), folder
        if not os.access(self.bench, os.X_OK):
            raise BadInput(f"{self.bench} is missing; run make build")
        self.commands = {case["step"]: shrink(self.bench if word == "gradwire-bench" else word
                                              for word in case["command"]) for case in cases}

    def rows(self, step):
        """Runs a step, with its output in STEP.log and its rows in STEP.json. Returns the rows, or None."""
        command, result, log = self.commands[step], self.folder / f"{step}.json", self.folder / f"{step}.log"
        result.unlink(missing_ok=True)
        print("== " + " ".join(command), flush=True)
        with open(log, "w") as output:
            output.write("$ " + " ".join(command) + "\n")
            output.flush()
            try:
                code = subprocess.run([*command, "--json", str(result)], cwd=ROOT, stdout=output,
                                      stderr=subprocess.STDOUT, timeout=DEADLINE_S).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                code = str(error)
        if code != 0:
            print(f"FAILED ({code}): {log.read_text().strip().splitlines()[-1]}", flush=True)
            return None
        return read_rows(self.folder, step)

    def slower_than(self, before, retries):
        """Prints comparisons with the results in `before`. Returns the steps with SLOWER rows.

        Measures such steps again, `retries` times: other work on the machine makes rows slower, so a step must
        be slower each time.
        """
        slower = list(self.commands)
        for attempt in range(1 + retries):
            steps, slower = slower, []
            for step in steps:
                if attempt > 0:
                    self.rows(step)
                print(f"\n{step}, A: {before}, B: {self.folder}", flush=True)
                compared = subprocess.run(
                    [self.bench, "compare", before / f"{step}.json", self.folder / f"{step}.json"],
                    capture_output=True, text=True)
                print(compared.stdout.rstrip(), flush=True)
                if compared.returncode not in (0, 1):
                    raise BadInput(compared.stderr.strip().removeprefix("gradwire-bench: "))
                slower += [step] * compared.returncode
        return slower


def read_rows(folder, step):
    path = folder / f"{step}.json"
    try:
        return json.loads(path.read_text())
    except OSError:
        return None
    except ValueError as error:
        raise BadInput(f"{path}: not JSON: {error}") from None


def verdicts_of_folder(cases, folder, device):
    rows = {step: read_rows(folder, step) for step in {case["step"] for case in cases}}
    return [verdict_of(case, rows[case["step"]], device) for case in cases]


def run(cases, runs, retries, device):
    """Returns the verdicts on the cases."""
    print(f"{len(cases)} cases on {device}, load {os.getloadavg()[0]:.1f}", flush=True)
    verdicts = [None] * len(cases)
    for attempt in range(1 + retries):
        steps = {case["step"] for case, j in zip(cases, verdicts) if j is None or j["verdict"] in FAILING}
        if not steps:
            break
        if attempt > 0:
            print("-- once more, where a case failed: a busy machine makes things slower, never faster",
                  flush=True)
        rows = {step: runs.rows(step) for step in runs.commands if step in steps}
        for i, case in enumerate(cases):
            if case["step"] in steps:
                now = verdict_of(case, rows[case["step"]], device)
                verdicts[i] = better(verdicts[i], now) if verdicts[i] else now
    return verdicts


def publish(path, cases, folder, device):
    """Rewrites the lines of cases with results in the folder. Other lines are unchanged."""
    lines, count = [], 0
    for line in pathlib.Path(path).read_text().splitlines():
        case = json.loads(line)
        if case["case"] in {c["case"] for c in cases}:
            try:
                value = measured(case, read_rows(folder, case["step"]))
                case.update(value=float(f"{value:.4g}"), commit=ranks.commit(), device=device)
                count += 1
            except NotMeasured as reason:
                print(f"{case['case']}: unchanged: {reason}")
        lines.append(json.dumps(case))
    pathlib.Path(path).write_text("\n".join(lines) + "\n")
    print(f"{path}: {count} cases published")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--only", default=".", metavar="REGEX", help="cases whose name matches")
    common.add_argument("--baselines", type=pathlib.Path, default=BASELINES)
    commands = parser.add_subparsers(dest="action", required=True)
    running = commands.add_parser("run", parents=[common], help="measure and compare")
    running.add_argument("--out", type=pathlib.Path, help="folder to keep the results in (default: none)")
    running.add_argument("--against", type=pathlib.Path, metavar="FOLDER",
                         help="the --out of another build's run on this machine")
    running.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    running.add_argument("--retries", type=int, default=1,
                         help="how often to repeat a failing case (default: 1)")
    comparing = commands.add_parser("compare", parents=[common], help="compare existing results")
    comparing.add_argument("--markdown", action="store_true")
    for command in (running, comparing):
        command.add_argument("--smoke", action="store_true",
                             help="tiny sizes; a case fails only if its row is missing")
    publishing = commands.add_parser("publish", parents=[common], help="make results the published values")
    for command in (comparing, publishing):
        command.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()

    cases, device, slower = read_cases(arguments.baselines, arguments.only), device_name(), []
    shrink, retries = list, getattr(arguments, "retries", 0)
    if getattr(arguments, "smoke", False):
        if why := ranks.no_links():
            print(f"NOT CHECKED: the cases of slow links: {why}")
            cases = [case for case in cases if not case["command"][0].endswith("/shaped_link.sh")]
        cases, shrink, retries = list(map(existence_only, cases)), smoke.tiny, 0
        os.environ.update(smoke.ENVIRONMENT)
    if arguments.action == "publish":
        publish(arguments.baselines, cases, arguments.folder, device)
        return 0
    if arguments.action == "compare":
        verdicts = verdicts_of_folder(cases, arguments.folder, device)
    else:
        with tempfile.TemporaryDirectory(prefix="gradwire-check-") as scratch:
            folder = arguments.out or pathlib.Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            runs = Runs(cases, arguments.build, folder.resolve(), shrink)
            verdicts = run(cases, runs, retries, device)
            if arguments.against:
                slower = runs.slower_than(arguments.against, retries)
    if slower:
        print(f"\nSLOWER than in {arguments.against}: {', '.join(slower)}")
    shape = report.markdown if arguments.action == "compare" and arguments.markdown else report.plain
    failed = sum(j["verdict"] in FAILING for j in verdicts)
    print("\n" + shape(table(cases, verdicts, device)).rstrip() +
          f"\n\nbench-check: {len(verdicts) - failed} of {len(verdicts)} cases ok" +
          (f", {failed} FAILED" if failed else ""))
    return 1 if slower or failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BadInput as error:
        print(f"bench-check: {error}", file=sys.stderr)
        sys.exit(2)
