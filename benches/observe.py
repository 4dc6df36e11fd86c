#!/usr/bin/env python3
"""What observing a run costs: processor time of the run's observing threads, in a real run, by /proc.

Usage: benches/observe.py [TASKS [SECONDS [ROUNDS]]]   (default 250, 20 and 3; needs a release build; HOTCELL_HOME or target/bench-home)

Each round starts a clone in which TASKS processes sleep, beside some 50 tasks of its kernel and init, lets the first seconds
pass (new processes cost more once), and then reads twice, SECONDS apart, how long the thread that looks at memory and VMM and
the one that reads the disk were on a processor; then the same with a shell beside them that counts for ever, since of a guest that
runs nothing less is read. The cadence is the run's own. Prints rows and a line of JSON; says what host it was by its load.
"""
import glob, json, os, statistics, subprocess, sys, tempfile, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOTCELL = os.environ.get("HOTCELL_BIN", os.path.join(ROOT, "target/release/hotcell"))
os.environ.setdefault("HOTCELL_HOME", os.path.join(ROOT, "target/bench-home"))
SETTLE_S = 3
BUSY = "while :; do n=$((n+1)); done &"


def observing(pid):
    """Seconds on a processor, by the thread's name."""
    used = {}
    for task in glob.glob(f"/proc/{pid}/task/*"):
        name = open(f"{task}/comm").read().strip()
        if name.startswith("observe-"):
            kind = "disk" if name == "observe-disk" else "look"
            used[kind] = used.get(kind, 0) + int(open(f"{task}/schedstat").read().split()[0]) / 1e9
    return used


def one(tasks, busy, seconds, number):
    with tempfile.TemporaryDirectory() as out:
        policy = os.path.join(out, "policy.toml")
        open(policy, "w").write("[limits]\npids = 1024\n[capabilities]\nwrite_trees = [\"/workspace\"]\nspawn = true\n")
        script = f"n=0; while [ $n -lt {tasks} ]; do sleep 600 & n=$((n+1)); done; {BUSY if busy else ''} echo up; wait"
        name = f"bench-observe-{os.getpid()}-{number}{'-busy' if busy else ''}"
        run = subprocess.Popen([HOTCELL, "run", "--accel", "tcg", "--policy", policy, "--out", out, "--name", name, "--", "/bin/sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert run.stdout.readline() == b"up\n"
        time.sleep(SETTLE_S)
        first, begun = observing(run.pid), time.monotonic()
        time.sleep(seconds)
        last, took = observing(run.pid), time.monotonic() - begun
        run.send_signal(2)
        code = run.wait()
    assert code == 130, code
    assert set(first) == set(last) == {"disk", "look"}, (first, last)
    return {kind: 100 * (last[kind] - first[kind]) / took for kind in first}


def main():
    tasks, seconds, rounds = [int(word) for word in sys.argv[1:]] + [250, 20, 3][len(sys.argv) - 1:]
    rows = [[one(tasks, busy, seconds, number) for busy in (False, True)] for number in range(rounds)]
    figures = {"tasks": tasks, "load": os.getloadavg()[0]}
    for busy, guest in enumerate(("idle", "busy")):
        for kind in ("look", "disk"):
            values = sorted(row[busy][kind] for row in rows)
            print(f"{kind} thread, {tasks} sleeping, {guest}: median {statistics.median(values):5.2f} % of a core   min {values[0]:5.2f}   max {values[-1]:5.2f}")
            figures[f"{guest}_{kind}_percent"] = values
    print(json.dumps(figures))


main()
