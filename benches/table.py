#!/usr/bin/env python3
"""Everything that is measured of Hotcell, as one table, one JSON file and one picture.

Usage: benches/table.py [ROUNDS] [--quick] [--to FOLDER]     (default 10; needs a release build)

Runs benches/run.py, cold.py, copy.py, observe.py and the benches `exec` and the latency tests one after the other (half an hour; --quick
leaves all but run.py and the round trips out), and writes bench.json and bench.svg to FOLDER (default target/bench). Each figure
is beside its peer of the same run. What could not run here is said, and has no row.
"""
import json, os, statistics, subprocess, sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(title, argv):
    """Prints what it says; gives its lines of JSON as one object, or nothing where it fails."""
    print(f"== {title}", flush=True)
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if done.returncode:
        print(f"{title}: NOT MEASURED, it ended with {done.returncode}", flush=True)
        return {}
    figures = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            figures |= json.loads(line)
    return figures or {"text": done.stdout}


def picture(bars, path):
    """Horizontal bars: name, median, least, most, unit; each group to its own scale."""
    height, y, body = 26, 16, []
    for group, unit, rows in bars:
        body.append(f'<text x="8" y="{y + 12}" font-weight="bold">{group}</text>')
        y += height
        most = max(high for _, _, _, high in rows) or 1
        for name, middle, low, high in rows:
            at = lambda value: 330 + 420 * value / most
            ours = "#2b6cb0" if name.startswith("hotcell") else "#a0aec0"
            body.append(f'<text x="320" y="{y + 13}" text-anchor="end">{name}</text>')
            body.append(f'<rect x="330" y="{y + 2}" width="{at(middle) - 330:.1f}" height="16" fill="{ours}"/>')
            body.append(f'<path d="M{at(low):.1f} {y + 10}H{at(high):.1f}" stroke="#1a202c"/>')
            body.append(f'<text x="{at(high) + 6:.1f}" y="{y + 14}">{middle:.{0 if middle >= 20 else 1}f} {unit}</text>')
            y += height
        y += 8
    text = "\n".join(body)
    open(path, "w").write(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="880" height="{y}" font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{text}\n</svg>\n')


def bars(figures):
    """Groups of what belongs side by side; what was not measured has no bar."""
    of = lambda name: figures.get(name, {})
    spread = lambda name, values: (name, statistics.median(values), min(values), max(values)) if values else None
    runs, trips, cold, copy, kills = of("run"), of("exec").get("round_trip_ms", {}), of("cold"), of("copy"), of("latency")
    density = runs.get("density", [])
    thousand = lambda values: [1e3 * value for value in values or []]
    groups = [
        ("One command, process start to exit", "ms", [
            spread("hotcell run, clone", runs.get("clone_ms")), spread("hotcell run, clone, slim kernel", runs.get("slim_ms")),
            spread("docker run, runc", runs.get("docker_ms"))]),
        ("The same, booted from scratch", "ms", [
            spread("hotcell run --cold", thousand(cold.get("hotcell_s")) or runs.get("cold_ms")),
            spread("plain QEMU, until its init is ready", thousand(cold.get("plain_qemu_s"))),
            spread("hotcell run --cold, slim kernel", runs.get("slim_cold_ms"))]),
        ("Of a run with a clone", "ms", [
            spread("hotcell, recording and judging", runs.get("run", {}).get("record_ms")),
            spread("hotcell, teardown to proven clean", runs.get("run", {}).get("teardown_ms"))]),
        ("true in a live machine or container, by the engine", "ms", [
            spread("hotcell exec, one after the other", trips.get("back_to_back")),
            spread("hotcell exec, after a pause", trips.get("after_60_ms")),
            spread("a shell in the machine, no engine", trips.get("shell")), spread("docker exec, runc", runs.get("docker_exec_ms"))]),
        ("256 MiB of noise, in and out", "MB/s", [
            spread("hotcell put", copy.get("put")), spread("raw virtio-serial port, in", copy.get("raw in")),
            spread("hotcell get", copy.get("get")), spread("raw virtio-serial port, out", copy.get("raw out"))]),
        ("A rule is broken: until the VMM is gone", "ms", [
            spread("hotcell, from the fifth denial", kills.get("kill_ms")), spread("hotcell, from sync's return", kills.get("kill_after_sync_ms")),
            *[spread(f"hotcell, {name}", values) for name, values in kills.get("kill_after_attack_ms", {}).items()]]),
        ("Observing 300 tasks", "% of a core", [
            spread(f"hotcell, {what}, {guest} guest", of("observe").get(f"{guest}_{kind}_percent"))
            for guest in ("idle", "busy") for kind, what in (("look", "memory and VMM"), ("disk", "disk"))]),
        ("Memory of an idle clone that is its own, VMM", "MiB", [
            spread(f"hotcell, {one['clones']} at once", one["vmm_mib"]) for one in density]),
        ("First output after, all started at once", "ms", [
            spread(f"hotcell, {one['clones']} at once", thousand(one["started_s"])) for one in density])]
    return [(name, unit, [row for row in rows if row]) for name, unit, rows in groups if any(rows)]


def main():
    words = sys.argv[1:]
    quick = "--quick" in words
    folder = words[words.index("--to") + 1] if "--to" in words else os.path.join(ROOT, "target/bench")
    rounds = next((word for word in words if word.isdigit()), "10")
    bench = ["cargo", "bench", "--locked", "-q", "-p"]
    latency = ["cargo", "test", "--locked", "-q", "--release", "-p", "hotcell-cli", "--test", "vm", "--", "--ignored", "--nocapture",
               "--test-threads", "1", "latency"]
    figures = {"run": run("runs, beside docker", ["benches/run.py", rounds])}
    figures["exec"] = run("execs", bench + ["hotcell-cli", "--bench", "exec", "--", "0" if quick else rounds])
    if not quick:
        figures["cold"] = run("cold starts, beside plain QEMU", ["benches/cold.py", rounds])
        figures["copy"] = run("files, beside a raw port", ["benches/copy.py"])
        figures["observe"] = run("observing", ["benches/observe.py"])
        os.environ.setdefault("HOTCELL_LATENCY_RUNS", rounds)
        figures["latency"] = run("from what breaks a rule to a VMM that is gone", latency)
        figures["ledger"] = run("ledger", bench + ["hotcell-ledger"])
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "bench.json"), "w") as out:
        json.dump(figures, out, indent=1)
    picture(bars(figures), os.path.join(folder, "bench.svg"))
    print(f"written: {folder}/bench.json, {folder}/bench.svg")


if __name__ == "__main__":
    main()
