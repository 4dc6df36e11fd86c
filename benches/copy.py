#!/usr/bin/env python3
"""Throughput of files in and out, beside a raw virtio-serial port with `cat` at its end.

Usage: benches/copy.py [ROUNDS] [MIB]   (default 5 and 256; needs a release build, busybox-static; uses HOTCELL_HOME or target/bench-home)

In turn in the same run: `hotcell run --put` and `--get` of a file of noise, and plain QEMU with the same kernel, whose init
reads the port into nothing (in) or writes zeroes to it (out). hotcell: the time of the whole run less that of one without the
copy; so hashing, recording, the guest's disk and the bundle's are in it, and starting is not. Raw: first byte to last.
Prints medians, spreads, ratios; a table and one line of JSON. What came out is compared with what went in, each time.
"""
import filecmp, json, os, shutil, socket, statistics, subprocess, sys, tempfile, time
from cold import machine

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOTCELL = os.path.join(ROOT, "target/release/hotcell")
HOME = os.environ.setdefault("HOTCELL_HOME", os.path.join(ROOT, "target/bench-home"))
INIT = """#!/busybox sh
/busybox mount -t devtmpfs none /dev; /busybox mount -t sysfs none /sys
for name in $(/busybox cat /modules/order); do /busybox insmod /modules/$name; done
until [ -c /dev/vport0p1 ] || [ -c /dev/vport1p1 ] || [ -c /dev/vport2p1 ]; do :; done
port=$(echo /dev/vport*p1)
exec 3<>$port
echo ready >&3
read way <&3
if [ $way = in ]; then /busybox cat <&3 >/dev/null
else /busybox dd if=/dev/zero bs=32k count=BLOCKS of=/dev/fd/3 2>/dev/null || /busybox dd if=/dev/zero bs=32k count=BLOCKS >&3; fi
/busybox sleep 1000
"""


def entry(name, mode, content=b""):
    fields = [0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0]
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    pad = lambda part: part + bytes(-len(part) % 4)
    return pad(head) + pad(content)


class Raw:
    """A machine whose init is a shell at a virtio-serial port."""

    def __init__(self, folder, size, bundle):
        _, self.append, self.kernel, ours, _, _ = machine(bundle)
        init = INIT.replace("BLOCKS", str(size >> 15)).encode()
        archive = open(ours, "rb").read()
        archive += bytes(-len(archive) % 4) + entry("busybox", 0o100755, open("/bin/busybox", "rb").read())
        archive += entry("sys", 0o40755) + entry("init", 0o100755, init) + entry("TRAILER!!!", 0)
        self.initramfs, self.socket, self.size = folder + "/initramfs", folder + "/port", size
        open(self.initramfs, "wb").write(archive)

    def seconds(self, way, noise):
        qemu = subprocess.Popen(
            ["qemu-system-x86_64", "-M", "microvm,x-option-roms=off,rtc=on,acpi=on,pit=off,pic=off", "-cpu", "max,erms=off",
             "-accel", "tcg", "-m", "512", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
             "-kernel", self.kernel, "-initrd", self.initramfs, "-append",
             self.append, "-serial", "null",
             "-chardev", f"socket,id=port,path={self.socket},server=on,wait=on", "-device", "virtio-serial-device,max_ports=2",
             "-device", "virtserialport,chardev=port,nr=1,name=org.hotcell.channel"])
        try:
            port = socket.socket(socket.AF_UNIX)
            deadline = time.monotonic() + 60
            while True:
                try:
                    port.connect(self.socket)
                    break
                except OSError:
                    if time.monotonic() > deadline or qemu.poll() is not None:
                        raise
                    time.sleep(0.01)
            port.settimeout(120)
            assert port.recv(6) == b"ready\n"
            if way == "in":
                data = open(noise, "rb").read()
                port.sendall(b"in\n")
                time.sleep(0.5)
                begun = time.monotonic()
                # What is in buffers still is some hundred KiB.
                port.sendall(data)
                return time.monotonic() - begun
            port.sendall(b"out\n")
            left, begun = self.size, None
            while left:
                left -= len(port.recv(min(left, 1 << 18)))
                begun = begun or time.monotonic()
            return time.monotonic() - begun
        finally:
            qemu.kill()
            qemu.wait()
            os.unlink(self.socket)


def hotcell(folder, flags, policy):
    begun = time.monotonic()
    done = subprocess.run([HOTCELL, "run", "--json", "--accel", "tcg", "--policy", policy, "--out", folder, *flags, "--", "true"],
                          capture_output=True, text=True)
    took = time.monotonic() - begun
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and report["verdict"] == "ALLOWED", (report, done.stderr)
    return took, report["bundle"]


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    mib = int(sys.argv[2]) if len(sys.argv) > 2 else 256
    size = mib << 20
    figures = {"put": [], "raw in": [], "get": [], "raw out": []}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        noise, policy = folder + "/noise", folder + "/policy.toml"
        with open(noise, "wb") as file:
            for _ in range(mib):
                file.write(os.urandom(1 << 20))
        open(policy, "w").write(f"[limits]\ndisk_mib = {max(1024, 2 * mib)}\ncopy_mib = {2 * mib}\ntimeout_s = 1200\n"
                                "[capabilities]\nwrite_trees = [\"/workspace\"]\nspawn = true\n")
        raw = Raw(folder, size, hotcell(folder, ["--cold"], policy)[1])
        put = ["--put", f"{noise}:/workspace/noise"]
        hotcell(folder, [], policy)
        for _ in range(rounds):
            empty, bundle = hotcell(folder, [], policy)
            shutil.rmtree(bundle)
            one, bundle = hotcell(folder, put, policy)
            shutil.rmtree(bundle)
            both, bundle = hotcell(folder, [*put, "--get", "/workspace/noise"], policy)
            assert filecmp.cmp(noise, bundle + "/files/workspace/noise", shallow=False), "what came out is not what went in"
            shutil.rmtree(bundle)
            figures["put"].append(size / (one - empty) / 1e6)
            figures["get"].append(size / (both - one) / 1e6)
            figures["raw in"].append(size / raw.seconds("in", noise) / 1e6)
            figures["raw out"].append(size / raw.seconds("out", noise) / 1e6)
    for name, speeds in figures.items():
        print(f"{name:8} median {statistics.median(speeds):6.1f} MB/s   min {min(speeds):6.1f}   max {max(speeds):6.1f}")
    for ours, peer in [("put", "raw in"), ("get", "raw out")]:
        ratios = [a / b for a, b in zip(figures[ours], figures[peer])]
        print(f"{ours} / {peer}: {statistics.median(ratios):.2f} x")
    print(f"({rounds} rounds of {mib} MiB, TCG, {os.cpu_count()} cores)")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
