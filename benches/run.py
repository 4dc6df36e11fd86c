#!/usr/bin/env python3
"""One run end to end, cold and cloned, beside `docker run` with runc where there is one; and idle clones at once.

Usage: benches/run.py [ROUNDS] [CLONES...]   (default 10 and 1 10 40 50; needs a release build; uses HOTCELL_HOME or target/bench-home)

In turn in the same run, process start to exit: `hotcell run -- true` with record, verdict and checked teardown, and
`docker run --rm --network none IMAGE true` (a dockerd of its own, started by hand, an image of the host's busybox); with the
slim kernel too where it is built. Where the time of a run goes, by its own report. Round trips of an exec in a running
container, by the engine's own interface. Then for each number of CLONES that many runs of `sleep` started at once: when each
said its first word, and how much memory is each's own, VMM and hotcell, from smaps. Prints medians and spreads, and a line of
JSON. It says on what host.
"""
import glob, http.client, json, os, platform, shutil, socket, statistics, subprocess, sys, tempfile, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOTCELL = os.environ.get("HOTCELL_BIN", os.path.join(ROOT, "target/release/hotcell"))
HOME = os.environ.setdefault("HOTCELL_HOME", os.path.join(ROOT, "target/bench-home"))


def timed(argv, **more):
    begun = time.monotonic()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **more)
    return time.monotonic() - begun


def reported(argv):
    """Milliseconds from process start to exit, and the run's own spans."""
    begun = time.monotonic()
    out = subprocess.run(argv[:2] + ["--json"] + argv[2:], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return 1e3 * (time.monotonic() - begun), json.loads(out.stdout.splitlines()[-1])["timings_ms"]


class Engine(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost")
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


class Docker:
    def __init__(self, folder):
        self.env = dict(os.environ, DOCKER_HOST=f"unix://{folder}/d.sock")
        self.program = next(p for p in ("/usr/bin/docker", shutil.which("docker")) if p and os.path.exists(p))
        self.daemon = subprocess.Popen(
            ["dockerd", "--iptables=false", "--bridge=none", "-H", self.env["DOCKER_HOST"], "--data-root", folder + "/data",
             "--exec-root", folder + "/exec", "-p", folder + "/pid"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while subprocess.run([self.program, "info"], env=self.env, capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise SystemExit("dockerd does not answer")
            time.sleep(0.1)
        os.makedirs(folder + "/root/bin")
        shutil.copy(shutil.which("busybox"), folder + "/root/bin/busybox")
        tar = subprocess.run(["tar", "-C", folder + "/root", "-c", "."], capture_output=True, check=True).stdout
        subprocess.run([self.program, "import", "-", "bb:1"], input=tar, env=self.env, check=True, stdout=subprocess.DEVNULL)

    def run(self):
        return timed([self.program, "run", "--rm", "--network", "none", "bb:1", "/bin/busybox", "true"], env=self.env)

    def execs(self, count):
        """Milliseconds of `true` in a running container: asked for, run and seen ended, all by the engine's interface."""
        name = subprocess.run([self.program, "run", "-d", "--rm", "--network", "none", "bb:1", "/bin/busybox", "sleep", "600"],
                              env=self.env, check=True, capture_output=True, text=True).stdout.strip()
        took = []
        for _ in range(count):
            begun = time.monotonic()
            answer = self.ask(f"/containers/{name}/exec", {"Cmd": ["/bin/busybox", "true"], "AttachStdout": True, "AttachStderr": True})
            self.ask(f"/exec/{json.loads(answer)['Id']}/start", {"Detach": False})
            took.append(1e3 * (time.monotonic() - begun))
        subprocess.run([self.program, "rm", "-f", name], env=self.env, check=True, capture_output=True)
        return took

    def ask(self, path, body):
        engine = Engine(self.env["DOCKER_HOST"].removeprefix("unix://"))
        engine.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return engine.getresponse().read()

    def end(self):
        self.daemon.terminate()
        self.daemon.wait()


def own_kib(pid):
    """Memory that goes with the process: private pages, by proc(5)."""
    try:
        text = open(f"/proc/{pid}/smaps_rollup").read()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("Private_Clean", "Private_Dirty")))


def vmm_of(run_id):
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = open(path, "rb").read().split(b"\0")
        except OSError:
            continue
        if b"-name" in words and words[words.index(b"-name") + 1] == b"hotcell-" + run_id.encode():
            return int(path.split("/")[2])


def density(count):
    names = [f"bench-{os.getpid()}-{number:03}" for number in range(count)]
    with tempfile.TemporaryDirectory() as out:
        begun = time.monotonic()
        runs = [subprocess.Popen([HOTCELL, "run", "--accel", "tcg", "--out", out, "--name", name, "--", "/bin/sh", "-c",
                                  "echo up; sleep 600"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for name in names]
        started = []
        for run in runs:
            assert run.stdout.readline() == b"up\n"
            started.append(time.monotonic() - begun)
        time.sleep(2)
        vmm = [own_kib(vmm_of(name)) / 1024 for name in names]
        hotcell = [own_kib(run.pid) / 1024 for run in runs]
        for run in runs:
            run.send_signal(2)
        codes = [run.wait() for run in runs]
    assert all(code == 130 for code in codes), codes
    return vmm, hotcell, started


def row(name, values, unit):
    values = sorted(values)
    print(f"{name:46} median {statistics.median(values):8.1f} {unit}   min {values[0]:8.1f}   max {values[-1]:8.1f}")


def quartile(values, at):
    return sorted(values)[min(len(values) - 1, int(at * len(values)))]


def spans(reports):
    """Where the time of one run goes: medians, in the order in which it passes."""
    whole = statistics.median(took for took, _ in reports)
    each = lambda name: [report.get(name, 0) for _, report in reports]
    of = lambda name: statistics.median(each(name))
    start, ready, total, down = of("vmm_start"), of("ready"), of("total"), of("teardown")
    rows = [("before the run's thread: image, spec, host, template; and exit after it", whole - total),
            ("record begun, VMM started and restored, inspected", start), ("guest goes on until it is ready", ready - start),
            ("observers armed, exec, disk written out, last readings", total - ready - down), ("VMM killed, reaped, all of it gone", down)]
    print(f"where {whole:.0f} ms of a run go (of it recording and judging, with their writes to disk: {of('record'):.1f} ms, {100 * of('record') / whole:.1f} %)")
    for name, took in rows:
        print(f"  {name:76} {took:6.1f} ms")
    return {"whole_ms": whole, "record_ms": each("record"), "teardown_ms": each("teardown"), "spans": rows}


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    counts = [int(word) for word in sys.argv[2:]] or [1, 10, 40, 50]
    load = os.getloadavg()[0]
    print(f"host: {platform.machine()}, Linux {platform.release()}, {os.cpu_count()} cores, load {load:.1f}; TCG")
    figures = {"host": platform.release(), "cores": os.cpu_count(), "load": load, "rounds": rounds}
    run = [HOTCELL, "run", "--accel", "tcg"]
    has_slim = os.path.exists(HOME + "/cache/kernels/slim/kernel.json")
    slim = run + ["--kernel", "slim"]
    for argv in [run] + [slim] * has_slim:
        timed(argv + ["--", "true"])
    with tempfile.TemporaryDirectory() as folder:
        docker = Docker(folder) if shutil.which("dockerd") else None
        if docker:
            docker.run()
        reports, peer, small = [], [], []
        for _ in range(rounds):
            reports.append(reported(run + ["--", "true"]))
            if docker:
                peer.append(1e3 * docker.run())
            if has_slim:
                small.append(1e3 * timed(slim + ["--", "true"]))
        clone = [took for took, _ in reports]
        less = range(max(rounds // 3, 1))
        cold = [1e3 * timed(run + ["--cold", "--", "true"]) for _ in less]
        small_cold = [1e3 * timed(slim + ["--cold", "--", "true"]) for _ in less if has_slim]
        execs = docker.execs(50) if docker else []
        if docker:
            docker.end()
    row("hotcell run -- true, clone, end to end", clone, "ms")
    row("hotcell run --cold -- true, end to end", cold, "ms")
    if has_slim:
        row("the same with the slim kernel, clone", small, "ms")
        row("the same with the slim kernel, cold", small_cold, "ms")
    else:
        print("slim kernel: NOT RUN, `hotcell kernel build` has not been")
    if peer:
        row("docker run --rm --network none, runc", peer, "ms")
        figures["ratio"] = statistics.median(a / b for a, b in zip(clone, peer))
        print(f"clone to docker, median of the pairs           {figures['ratio']:.2f} x")
        row("exec of true in a container, by the engine", execs, "ms")
    else:
        print("docker run: NOT RUN, there is no dockerd here")
    figures |= {"clone_ms": clone, "cold_ms": cold, "slim_ms": small, "slim_cold_ms": small_cold, "docker_ms": peer,
                "docker_exec_ms": execs, "run": spans(reports), "density": []}
    for count in counts:
        vmm, hotcell, started = density(count)
        row(f"{count} idle clones: private memory of a VMM", vmm, "MiB")
        row(f"{count} idle clones: private memory of a hotcell", hotcell, "MiB")
        row(f"{count} started at once: first output after", [1e3 * s for s in started], "ms")
        print(f"{count} started at once: p95                         {1e3 * quartile(started, 0.95):8.1f} ms")
        figures["density"].append({"clones": count, "vmm_mib": vmm, "hotcell_mib": hotcell, "started_s": started})
    alone = next((one["started_s"][0] for one in figures["density"] if one["clones"] == 1), None)
    if alone and counts[-1] > 1:
        each = counts[-1] / os.cpu_count() * alone
        p95 = quartile(figures["density"][-1]["started_s"], 0.95)
        figures["p95_to_single_per_core"] = p95 / each
        print(f"p95 of {counts[-1]} to one start after the other on {os.cpu_count()} cores: {p95 / each:.2f} x")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
