#!/usr/bin/env python3
"""Cold start: `hotcell run --cold -- true`, end to end, beside plain QEMU that boots the same kernel and initramfs.

Usage: benches/cold.py [ROUNDS]   (default 10; needs a release build; uses HOTCELL_HOME or target/bench-home)

Both in turn in the same run. hotcell: process start to exit, with record, verdict and checked teardown. Plain QEMU: the
same machine, disks and command line, from process start until the guest's init says ready, then SIGKILL until reaped.
Prints medians, spreads and the ratio of the medians; a table and one line of JSON.
"""
import glob, json, os, re, shutil, socket, statistics, struct, subprocess, sys, tempfile, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOTCELL = os.path.join(ROOT, "target/release/hotcell")
HOME = os.environ.setdefault("HOTCELL_HOME", os.path.join(ROOT, "target/bench-home"))


def hotcell():
    begun = time.monotonic()
    out = subprocess.run([HOTCELL, "run", "--json", "--cold", "--accel", "tcg", "--", "true"], capture_output=True, check=True)
    return time.monotonic() - begun, json.loads(out.stdout.splitlines()[-1])


def machine(bundle):
    """QEMU's argv as the record has it, the inherited descriptors replaced by files of our own."""
    argv = next(a for a in map(load, glob.glob(bundle + "/objects/*")) if isinstance(a, list) and "-kernel" in a)
    append = argv[argv.index("-append") + 1]
    kernel = os.path.join(HOME, "cache/kernels/cloud/vmlinuz")
    # The very one that the run booted: there is one for each kernel.
    digest = json.load(open(bundle + "/spec.json"))["image"]["initramfs"]
    initramfs = os.path.join(HOME, f"cache/initramfs/{digest}.cpio")
    root = os.path.join(HOME, "state/images/busybox/root.sqfs")
    blank = max(glob.glob(os.path.join(HOME, "cache/workspace/*.img")), key=os.path.getmtime)
    shape = [word for flag in ("-M", "-cpu", "-object", "-m", "-smp") for word in (flag, argv[argv.index(flag) + 1])]
    return shape, append, kernel, initramfs, root, blank


def load(path):
    try:
        return json.load(open(path))
    except ValueError:
        return None


def plain(shape, append, kernel, initramfs, root, blank):
    with tempfile.TemporaryDirectory() as folder:
        overlay, channel = folder + "/overlay.img", folder + "/channel"
        subprocess.run(["cp", "--sparse=always", blank, overlay], check=True)
        begun = time.monotonic()
        qemu = subprocess.Popen(
            ["qemu-system-x86_64", *shape, "-accel", "tcg", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
             "-kernel", kernel, "-initrd", initramfs, "-append", append, "-serial", "null",
             "-drive", f"id=root,if=none,file={root},format=raw,readonly=on", "-device", "virtio-blk-device,drive=root,serial=root",
             "-drive", f"id=overlay,if=none,file={overlay},format=raw", "-device", "virtio-blk-device,drive=overlay,serial=overlay",
             "-device", "virtio-serial-device", "-chardev", f"socket,id=channel,path={channel},server=on,wait=off",
             "-device", "virtserialport,chardev=channel,name=org.hotcell.channel"])
        try:
            sock = socket.socket(socket.AF_UNIX)
            deadline = begun + 120
            while True:
                try:
                    sock.connect(channel)
                    break
                except OSError:
                    if time.monotonic() > deadline or qemu.poll() is not None:
                        raise
                    time.sleep(0.005)
            configure = bytes(96) + struct.pack("<QQIQIIB7x", time.time_ns(), 64 << 20, 256, 0, 1000, 1000, 0)
            sock.sendall(struct.pack("<2sBBIII", b"HC", 1, 0x01, 0, 0, len(configure)) + configure)
            sock.settimeout(120)
            header = b""
            while len(header) < 4:
                header += sock.recv(16)
            assert header[:2] == b"HC" and header[3] == 0x41, header
        finally:
            qemu.kill()
            qemu.wait()
        return time.monotonic() - begun


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    shape, append, *files = machine(hotcell()[1]["bundle"])
    ours, peer = [], []
    for _ in range(rounds):
        ours.append(hotcell()[0])
        peer.append(plain(shape, append, *files))
    show = lambda name, t: print(f"{name:34} median {statistics.median(t):6.3f} s   min {min(t):6.3f}   max {max(t):6.3f}")
    show("hotcell run --cold -- true, end to end", ours)
    show("plain QEMU to ready, killed", peer)
    ratio = statistics.median(ours) / statistics.median(peer)
    print(f"ratio of the medians               {ratio:.3f} x   ({rounds} rounds, TCG, {os.cpu_count()} cores)")
    print(json.dumps({"hotcell_s": ours, "plain_qemu_s": peer, "ratio": ratio}))


if __name__ == "__main__":
    main()
