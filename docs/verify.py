#!/usr/bin/env python3
"""An independent verifier for Hotcell bundles, from docs/record.md and AMES-V1 alone.

    verify.py BUNDLE [--key VKEY]

Needs `blake3` (pip install blake3). Checks the signature where the `cryptography` package is present, and says so where not.
Checks chain, Merkle roots, dense sequences, run markers, lineage (Gate 1), the checkpoint note, objects and files; it
does not recompute the verdict. Exit codes: 0 intact, 1 not intact, 2 asked wrongly, 3 incomplete.
"""
import base64, hashlib, os, re, struct, sys

try:
    from blake3 import blake3
except ImportError:
    print("verify.py needs blake3: python3 -m venv v && v/bin/pip install blake3 cryptography, then v/bin/python verify.py", file=sys.stderr)
    sys.exit(2)

TAGS = {k: b"AMES_V1_" + k.encode() for k in ("EVENT", "MERKLE_LEAF", "MERKLE_NODE", "BLOCK", "CHECKPOINT")}
HOST_BAND, NO_PARENT, MAX_PAYLOAD = 0xFFFFFFFFFFFFFF00, 0xFFFFFFFFFFFFFFFF, 1 << 20
SPAWN, EXIT, TOOL, BEGIN, END = 0x01, 0x02, 0x05, 0x7E, 0x7F
TYPES = {1, 2, 3, 4, 5, 6, 7, BEGIN, END}
broken, incomplete = [], []


def commit(domain, data):
    return blake3(TAGS[domain] + data).digest()


def root(digests):
    level = [commit("MERKLE_LEAF", d) for d in digests]
    while len(level) > 1:
        pairs = [level[i:i + 2] for i in range(0, len(level), 2)]
        level = [commit("MERKLE_NODE", b"".join(p)) if len(p) == 2 else p[0] for p in pairs]
    return level[0] if level else bytes(32)


def event_at(data, at):
    """The event at this position and the next position; None where the file ends inside it."""
    if at + 41 > len(data):
        return None, at
    kind, seq, time, actor, parent, size, reserved = struct.unpack_from(">BQQQQII", data, at)
    if kind not in TYPES or reserved or size > MAX_PAYLOAD or actor == NO_PARENT:
        raise ValueError(f"the bytes at {at} are no event")
    end = at + 41 + size
    if end > len(data):
        return None, at
    return (kind, seq, time, actor, parent, data[at + 41:end], data[at:end]), end


def read_chain(data):
    """Events and head digests of the whole blocks."""
    events, heads, at, prev = [], [], 0, bytes(32)
    while at < len(data):
        start = at
        if at + 88 > len(data):
            incomplete.append(f"{len(data) - start} bytes of an unfinished block")
            break
        height, prev_hash, count, events_root, _ = struct.unpack_from(">Q32sQ32sQ", data, at)
        header, at, block = data[at:at + 88], at + 88, []
        while len(block) < count:
            event, at = event_at(data, at)
            if event is None:
                break
            block.append(event)
        if len(block) < count:
            fits = at == len(data) and root([commit("EVENT", e[6]) for e in block]) == events_root
            (broken if fits else incomplete).append(f"the file ends inside block {len(heads)}")
            break
        if height != len(heads) or prev_hash != prev or not block:
            broken.append(f"block {len(heads)} says height {height}, and does not follow, or is empty")
        if root([commit("EVENT", e[6]) for e in block]) != events_root:
            broken.append(f"block {len(heads)}: the root is another")
        prev = commit("BLOCK", header)
        heads.append(prev)
        events += block
    return events, heads


def gate1(events):
    """Markers, sequences and lineage. Lineage faults decide the verdict, not whether the record is intact."""
    live, gone, faults = set(), set(), []
    for i, (kind, seq, _, actor, parent, _, _) in enumerate(events):
        if seq != i:
            broken.append(f"event {seq} stands at place {i}")
        if (kind == BEGIN) != (i == 0) or (kind == END and i != len(events) - 1):
            broken.append(f"event {i}: a run marker inside, or none at the start")
        if kind in (BEGIN, END):
            continue
        if kind == SPAWN:
            if actor in live or actor in gone or (parent != NO_PARENT and parent not in live):
                faults.append(f"event {i}: spawn of {actor:#x}")
            live.add(actor)
        elif actor not in live:
            faults.append(f"event {i}: by {actor:#x}, which is not live")
        elif kind == EXIT:
            live.remove(actor)
            gone.add(actor)
    ended = bool(events) and events[-1][0] == END
    if not ended:
        incomplete.append("no RUN_END")
    return ended, faults + ([f"{len(live)} actors are still live"] if ended and live else [])


def needed_objects(events):
    for kind, seq, _, actor, _, payload, _ in events:
        if kind == SPAWN and payload[32:64] != bytes(32):
            yield payload[32:64].hex()
        if kind == TOOL and actor >= HOST_BAND:
            (size,) = struct.unpack_from(">I", payload)
            if payload[4:4 + size].startswith(b"hotcell."):
                yield payload[4 + size:36 + size].hex()


def open_note(note, key):
    """The lines of the note's text, its signature checked if that can be done here."""
    text, _, signatures = note.rpartition("\n\n")
    lines = text.split("\n")
    claimed = next((l[4:] for l in lines[3:] if l.startswith("key ")), None)
    if key and claimed != key:
        broken.append(f"signed by {claimed}, not by {key}")
    name, key_id, key64 = claimed.split("+", 2)
    raw = base64.b64decode(key64, validate=True)
    want = hashlib.sha256(name.encode() + b"\n" + raw).digest()[:4]
    found = [l.split(" ") for l in signatures.splitlines()]
    sigs = [base64.b64decode(f[2], validate=True) for f in found if len(f) == 3 and f[:2] == ["\u2014", name]]
    sigs = [s[4:] for s in sigs if s[:4] == want and want.hex() == key_id and raw[0] == 1]
    if not sigs:
        raise ValueError("no signature by the key that it names")
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        print("signature  NOT CHECKED: the cryptography package is missing")
        return lines
    try:
        Ed25519PublicKey.from_public_bytes(raw[1:]).verify(sigs[0], (text + "\n").encode())
        print(f"signature  by {claimed}" + ("" if key else ", not compared with any key you trust"))
    except Exception:
        broken.append("the signature does not fit the note")
    return lines


def check_note(bundle, lines, heads, files, objects):
    height, head = int(lines[1]), base64.b64decode(lines[2], validate=True)
    if height != len(heads) or (heads[-1] if heads else bytes(32)) != head:
        broken.append(f"the note covers {height} blocks up to {head.hex()}: the ledger was cut or rewritten")
    covered = set()
    for line in lines[3:]:
        word, *rest = line.split(" ")
        if word == "file":
            path = re.sub(rb"%([0-9A-F]{2})", lambda m: bytes.fromhex(m[1].decode()), rest[0].encode())
            covered.add(path)
            if path not in files or digest_of(bundle, path) != rest[1] or os.path.getsize(os.path.join(bundle, path)) != int(rest[2]):
                broken.append(f"{path!r} is not what the note covers")
        elif word == "objects":
            names = sorted(objects)
            if rest != [str(len(names)), blake3(b"".join(map(bytes.fromhex, names))).hexdigest()]:
                broken.append("the objects are not those that the note covers")
    broken.extend(f"{path!r} is covered by no line" for path in files - covered)


def digest_of(bundle, path):
    hasher = blake3()
    with open(os.path.join(bundle, path), "rb") as f:
        while chunk := f.read(1 << 20):
            hasher.update(chunk)
    return hasher.hexdigest()


def listing(bundle):
    files, objects = set(), set()
    for top, dirs, names in os.walk(bundle):
        for name in names + [d for d in dirs if os.path.islink(os.path.join(top, d))]:
            path = os.path.relpath(os.path.join(top, name), bundle)
            if os.path.islink(os.path.join(bundle, path)) or not os.path.isfile(os.path.join(bundle, path)):
                broken.append(f"{path!r} is not a regular file")
            elif os.path.dirname(path) == b"objects" and re.fullmatch(rb"[0-9a-f]{64}", name):
                objects.add(name.decode())
            elif path not in (b"ledger.ames", b"checkpoint.note"):
                files.add(path)
    return files, objects


def main(bundle, key):
    bundle = os.fsencode(bundle)
    files, objects = listing(bundle)
    ledger, note = (os.path.join(bundle, n) for n in (b"ledger.ames", b"checkpoint.note"))
    events, heads = [], []
    try:
        with open(ledger, "rb") as f:
            events, heads = read_chain(f.read())
    except (OSError, ValueError) as e:
        broken.append(str(e))
    ended, faults = gate1(events)
    print(f"ledger     {len(events)} events in {len(heads)} blocks, head {heads[-1].hex() if heads else '-'}")
    print("gate 1     " + ("; ".join(faults[:10]) or "ok"))
    broken.extend(f"object {n} is missing" for n in set(needed_objects(events)) - objects)
    broken.extend(f"object {n} was altered" for n in objects if digest_of(bundle, b"objects/" + n.encode()) != n)
    if os.path.lexists(note):
        try:
            with open(note, encoding="utf-8", newline="") as f:
                check_note(bundle, open_note(f.read(1_000_000), key), heads, files, objects)
        except (OSError, ValueError, IndexError, AttributeError) as e:
            broken.append(f"the note can't be read: {e}")
    elif ended:
        broken.append("the run ended and there is no note")
    for word, found in (("BROKEN", broken), ("INCOMPLETE", incomplete)):
        for line in found[:20]:
            print(f"{word:10} {line}")
    print("result     " + ("NOT INTACT" if broken else "INCOMPLETE" if incomplete else "INTACT"))
    return 1 if broken else 3 if incomplete else 0


if __name__ == "__main__":
    args = sys.argv[1:]
    if len(args) not in (1, 3) or (len(args) == 3 and args[1] != "--key") or not os.path.isdir(args[0]):
        sys.exit(print(__doc__, file=sys.stderr) or 2)
    sys.exit(main(args[0], args[2] if len(args) == 3 else None))
