"""Runs a program repeatedly, each time with another request for a resource refused (refuse.c).

Checks that the program ends with the correct result or a clean error, never by a signal or in a hang.
"""
import collections
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading

KINDS = ("malloc", "small", "mmap", "thread", "eventfd", "socket", "accept", "open", "write", "sync",
         "rename")
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK",
             "PMI_SIZE")
LIMIT_S = 60  # a longer run is a hang: the programs' deadlines are a few seconds
CRASHES = re.compile(
    r"terminate called|Sanitizer|corrupted|runtime error:|GW_INTERNAL|unaligned tcache|free\(\)")


class Case:
    """A program, as the commands of its processes. Requests of one process are refused."""

    def __init__(self, name, commands, victim=0, environments=None, result=None, later=False, clean=None):
        self.name, self.commands, self.victim = name, commands, victim
        self.environments = environments or [{}] * len(commands)
        self.result = result or (lambda folder, outputs: None)  # equal in every successful run
        self.later = later
        # Checks the outputs of a failed run, [(code, stdout, stderr)]. Returns the problem, or "".
        self.clean = clean or (lambda outputs: "")


class Outcome:
    def __init__(self, what, detail="", refused=False, seen=None, result=None):
        self.what, self.detail, self.refused, self.seen, self.result = what, detail, refused, seen, result


def run(case, library, kind, at, extra=None, limit_s=LIMIT_S):
    """Runs the program once, with request `at` of `kind` refused. Returns the outcome.

    Outcome.what is right, error, crash, hang, unclean or wrong.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gradwire-refuse-"))
    log = folder / "refused"
    processes = []
    try:
        for i, command in enumerate(case.commands):
            environment = {k: v for k, v in os.environ.items() if k not in LAUNCHERS}
            environment.update(case.environments[i])
            # Memory of 64 KiB or more is unmapped when it is freed, so that a write after free crashes.
            environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536")
            environment.update(extra or {})
            if i == case.victim:
                environment.update(LD_PRELOAD=str(library), GRADWIRE_REFUSE=f"{kind}:{at}",
                                   GRADWIRE_REFUSE_LOG=str(log))
                if case.later:
                    environment["GRADWIRE_REFUSE_LATER"] = "1"
            processes.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE,
                                              stderr=subprocess.PIPE, text=True, errors="replace"))
        outputs = [None] * len(processes)

        def collect(i):
            outputs[i] = processes[i].communicate()

        threads = [threading.Thread(target=collect, args=(i,)) for i in range(len(processes))]
        for thread in threads:
            thread.start()
        threads[0].join(limit_s)
        for thread in threads[1:]:
            thread.join(limit_s if not threads[0].is_alive() else 0.1)
        hung = [i for i, thread in enumerate(threads) if thread.is_alive()]
        for i in hung:
            processes[i].kill()
        for thread in threads:
            thread.join()
        said = [(p.returncode, *outputs[i]) for i, p in enumerate(processes)]
        lines = log.read_text().splitlines() if log.exists() else []
        refused = any(line.startswith("refused") for line in lines)
        seen = {line.split()[1]: int(line.split()[2]) for line in lines if line.startswith("seen")}
        text = "\n".join(f"[{i}] code {code}: {out[-300:]} | {err[-1500:]}"
                         for i, (code, out, err) in enumerate(said))
        what, detail = "right", ""
        if hung:
            what, detail = "hang", text
        elif any(code < 0 or code > 2
                 for code, _, _ in said) or any(CRASHES.search(out + err) for _, out, err in said):
            what, detail = "crash", text
        elif any(code != 0 for code, _, _ in said):
            wrong = case.clean(said)
            what, detail = ("unclean", f"{wrong}: {text}") if wrong else ("error", text)
        result = case.result(folder, said) if what == "right" else None
        return Outcome(what, detail, refused, seen, result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def chosen(count, most):
    """Returns at most `most` of 1 .. count, spread evenly, including the first and the last."""
    if count <= most:
        return range(1, count + 1)
    return sorted({1 + round(i * (count - 1) / (most - 1)) for i in range(most)}) if most > 1 else [1][:most]


def record(case, request, outcome, expected, counts, failures):
    """Counts a run's outcome. Adds a failure unless it is the expected result or a clean error."""
    if outcome.what == "right" and outcome.result != expected.result:
        outcome.what, outcome.detail = "wrong", f"{outcome.result} instead of {expected.result}"
    counts[request.split()[0], outcome.what] += 1
    if outcome.what not in ("right", "error"):
        failures.append(f"{case.name}: {request}: {outcome.what}: {outcome.detail}")


def sweep(case, library, most, extra=None):
    """Refuses requests of each kind in `most`. Returns the number of runs by kind and outcome, and failures.

    Refuses each request in one run, and with all later requests in another run. If most[kind] is a number,
    refuses that number of requests, alternately alone and with all later requests.
    """
    counts, failures = collections.Counter(), []
    first = run(case, library, "none", 0, extra)
    if first.what != "right":
        return counts, [f"{case.name}: fails by itself: {first.detail}"]
    for kind, some in most.items():
        count = first.seen.get(kind, 0)
        n = 0
        if some is None:
            points = [(at, then) for at in range(1, count + 1) for then in ("", "+")]
        else:
            points = [(at, "+" if i % 2 else "") for i, at in enumerate(chosen(count, some))]
        for at, then in points:
            outcome = run(case, library, kind, f"{at}{then}", extra)
            if not outcome.refused:
                continue
            n += 1
            record(case, f"{kind} {at}{then} of {count}", outcome, first, counts, failures)
        if count > 0:
            print(f"{case.name:12} {kind:8} {n:5} of {count:5} " +
                  " ".join(f"{what} {c}" for (k, what), c in sorted(counts.items()) if k == kind), flush=True)
    return counts, failures


def bursts(case, library, runs, generator):
    """Refuses random runs of 5 or more small requests, or all from a random one on. Returns as sweep()."""
    counts, failures = collections.Counter(), []
    without = run(case, library, "none", 0)
    count = without.seen.get("small", 0)
    for _ in range(runs):
        first = generator.randint(1, count)
        at = f"{first}{generator.choice(['+', f'-{first + 4}', f'-{first + generator.randint(5, 500)}'])}"
        outcome = run(case, library, "small", at)
        record(case, f"small {at} of {count}", outcome, without, counts, failures)
    print(f"{case.name:12} bursts   {runs:5} of {count:5} " +
          " ".join(f"{what} {c}" for (_, what), c in sorted(counts.items())), flush=True)
    return counts, failures


def one_line_errors(outputs):
    """Checks that a failing process prints the reason in one line of stderr, apart from warnings."""
    for code, _, err in outputs:
        lines = err.splitlines()
        if code != 0 and not (lines and lines[-1].startswith("gradwire: ")):
            return f"code {code} without an error's line"
        if any(not line.startswith("gradwire: ") for line in lines):
            return "lines that are not Gradwire's"
    return ""


def refused_or_lost(outputs):
    """Checks one_line_errors(), and that the last line has a status for a refused resource or a lost rank."""
    for code, _, err in outputs:
        last = (err.splitlines() or [""])[-1]
        if code != 0 and not re.search("GW_NO_MEMORY|GW_COMM_FAILED|rank [01]: $", last):
            return f"another status: {last}"
    return one_line_errors(outputs)
