#!/usr/bin/env python3
"""Ordinary work under the host's eyes: how many runs of it are killed, of which the right number is none.

    benches/soak.py [RUNS] [IMAGE]      default 200, and the image `soak`:
    hotcell image build soak --from debian:bookworm --include python3,gcc,libc6-dev,make,git

Each kind of work in turn; prints one line for each run that did not end ALLOWED with exit code 0,
and the counts at the end. Two runs at once, as many as there are processors here.
"""
import collections, concurrent.futures, json, os, subprocess, sys, time

HOTCELL = os.environ.get("HOTCELL", "target/release/hotcell")
WORK = {
    "compiler": "cd /tmp && for i in 1 2 3; do printf 'int f%d(int a){return a*%d;}\\n' $i $i >f$i.c; "
                "gcc -O2 -c f$i.c -o f$i.o || exit 1; done; ar rc lib.a f1.o f2.o f3.o && echo built",
    "python tests": "mkdir -p /tmp/t && cd /tmp/t && printf 'import unittest, subprocess\\nclass T(unittest.TestCase):\\n"
                    "    def test_a(self): self.assertEqual(subprocess.run([\"true\"]).returncode, 0)\\n"
                    "    def test_b(self): self.assertEqual(sum(range(9)), 36)\\n' >test_x.py && python3 -m unittest -q",
    "short processes": "i=0; while [ $i -lt 1000 ]; do /bin/true; i=$((i+1)); done",
    "threads": "python3 -c 'import threading, time\nts=[threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(100)]\n"
               "[t.start() for t in ts]; [t.join() for t in ts]'",
    "fork storm": "for r in 1 2 3 4 5; do for i in $(seq 100); do (:) & done; wait; done",
    "git": "export HOME=/tmp; git init -q r && cd r && git config user.email a@b && git config user.name a && for i in $(seq 15); do "
           "echo $i >>f; mkdir -p d$i; head -c 20000 /dev/urandom >d$i/b; git add . && git commit -qm $i || exit 1; done; "
           "git checkout -q -b side HEAD~5 && git merge -q master 2>/dev/null || true; git gc -q && git fsck && rm -rf d1 d2 && git status -s | wc -l",
    "pipes": "for i in $(seq 40); do seq 200 | sort -r | head -n 3 | tail -n 1 >/dev/null; done",
}


def one(number: int, image: str):
    kind = list(WORK)[number % len(WORK)]
    begun = time.time()
    done = subprocess.run(
        [HOTCELL, "run", "--image", image, "--json", "--timeout", "300", "--", "/bin/sh", "-c", WORK[kind]],
        capture_output=True, text=True)
    try:
        report = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        report = {"verdict": "NO REPORT", "kill": {"reasons": []}, "error": done.stderr[-400:]}
    return number, kind, done.returncode, report, time.time() - begun


def main():
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    image = sys.argv[2] if len(sys.argv) > 2 else "soak"
    counts = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for number, kind, code, report, took in pool.map(lambda n: one(n, image), range(runs)):
            counts[kind, report["verdict"], code] += 1
            if (report["verdict"], code) != ("ALLOWED", 0):
                print(f"run {number} ({kind}): {report['verdict']} {report['kill']['reasons']} exit {code} "
                      f"after {took:.1f} s, {report.get('run_id')}: {report.get('error')}", flush=True)
    for (kind, verdict, code), count in sorted(counts.items()):
        print(f"{count:4} {kind}: {verdict}, exit {code}")
    killed = sum(count for (_, verdict, _), count in counts.items() if verdict != "ALLOWED")
    print(f"{runs} runs, {killed} not ALLOWED")
    return 1 if killed else 0


sys.exit(main())
