#!/usr/bin/env python3
"""One run end to end, cold and cloned, beside `docker run` with runc where there is one; and idle clones at once.

Usage: benches/run.py [ROUNDS] [CLONES]   (default 10 and 40; needs a release build; uses HOTCELL_HOME or target/bench-home)

In turn in the same run, process start to exit: `hotcell run -- true` with record, verdict and checked teardown, and
`docker run --rm --network none IMAGE true` (a dockerd of its own, started by hand, an image of the host's busybox). Then CLONES
runs of `sleep` at once: memory of each that is its own, VMM and hotcell, from smaps. Prints medians and spreads, and a
line of JSON. It says on what host.
"""
import glob, json, os, platform, shutil, statistics, subprocess, sys, tempfile, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOTCELL = os.environ.get("HOTCELL_BIN", os.path.join(ROOT, "target/release/hotcell"))
HOME = os.environ.setdefault("HOTCELL_HOME", os.path.join(ROOT, "target/bench-home"))


def timed(argv, **more):
    begun = time.monotonic()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **more)
    return time.monotonic() - begun


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


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    clones = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    load = os.getloadavg()[0]
    print(f"host: {platform.machine()}, Linux {platform.release()}, {os.cpu_count()} cores, load {load:.1f}; TCG")
    figures = {"host": platform.release(), "cores": os.cpu_count(), "load": load, "rounds": rounds}
    run = [HOTCELL, "run", "--accel", "tcg"]
    timed(run + ["--", "true"])
    with tempfile.TemporaryDirectory() as folder:
        docker = Docker(folder) if shutil.which("dockerd") else None
        if docker:
            docker.run()
        clone, cold, peer = [], [], []
        for _ in range(rounds):
            clone.append(1e3 * timed(run + ["--", "true"]))
            if docker:
                peer.append(1e3 * docker.run())
        for _ in range(max(rounds // 3, 1)):
            cold.append(1e3 * timed(run + ["--cold", "--", "true"]))
        if docker:
            docker.end()
    row("hotcell run -- true, clone, end to end", clone, "ms")
    row("hotcell run --cold -- true, end to end", cold, "ms")
    if peer:
        row("docker run --rm --network none, runc", peer, "ms")
        ratio = statistics.median(a / b for a, b in zip(clone, peer))
        print(f"clone to docker, median of the pairs           {ratio:.2f} x")
        figures["ratio"] = ratio
    else:
        print("docker run: NOT RUN, there is no dockerd here")
    figures |= {"clone_ms": clone, "cold_ms": cold, "docker_ms": peer}
    vmm, hotcell, started = density(clones)
    row(f"{clones} idle clones: private memory of a VMM", vmm, "MiB")
    row(f"{clones} idle clones: private memory of a hotcell", hotcell, "MiB")
    row(f"{clones} started at once: first output after", [1e3 * s for s in started], "ms")
    figures |= {"idle_clones": clones, "vmm_mib": vmm, "hotcell_mib": hotcell, "started_s": started}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
