//! A small honest bundle, with something that the guest said. Its facts stand here as
//! docs/record.md has them: the crate that judges is out of this one's reach.

use hotcell_ledger::{
    ActorId, Cadence, Capability, Digest, FileOp, LedgerWriter, Payload, SigningKey, bundle as sealing,
};
use hotcell_policy::{ImageRef, PolicyDraft, RunDraft};

pub(crate) fn bundle(said: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    std::fs::create_dir(path.join("objects")).unwrap();
    let object = |bytes: &[u8]| {
        let name = Digest::of(bytes);
        std::fs::write(path.join("objects").join(name.to_hex()), bytes).unwrap();
        name
    };
    let part = |what: &str| Digest::of(what.as_bytes());
    let image = ImageRef {
        name: "busybox".into(),
        kernel: part("kernel"),
        initramfs: part("initramfs"),
        root: part("root"),
    };
    let run_id = "run-00000001";
    let spec = RunDraft::new(run_id, image, PolicyDraft::for_running_a_command()).seal().unwrap();
    std::fs::write(path.join("spec.json"), spec.to_json()).unwrap();
    std::fs::write(path.join("report.json"), r#"{"verdict":"ALLOWED"}"#).unwrap();
    let mut writer = LedgerWriter::create(path.join("ledger.ames"), Cadence::default()).unwrap();
    let mut now = 0;
    let mut add = |actor, parent, payload| {
        now += 1_000_000;
        writer.append(actor, parent, payload, now).unwrap();
    };
    let spawn = |argv: Digest| Payload::ProcessSpawn { binary: Digest::ZERO, argv, cwd: "/".into() };
    let fact = |name: &str, result: Digest, rest: &str| {
        let args = object(format!(r#"{{"fact":"{name}",{rest}}}"#).as_bytes());
        Payload::ToolCall { tool: format!("hotcell.{name}").as_str().into(), args, result }
    };
    let (host, vm, guest) = (ActorId::HOST, ActorId::VM, ActorId::FIRST_GUEST);
    add(host, None, Payload::RunBegin);
    add(host, None, spawn(object(&spec.to_json())));
    let begun = format!(r#""run_id":"{run_id}","spec":"{}","layers":[]"#, spec.digest());
    add(host, None, fact("spec", spec.digest(), &begun));
    for what in ["kernel", "initramfs", "root"] {
        let measured = format!(r#""what":"{what}","digest":"{}","bytes":1"#, part(what));
        add(host, None, fact("measured", part(what), &measured));
    }
    add(host, None, fact("switch_proven", Digest::ZERO, r#""rules":39"#));
    add(vm, Some(host), spawn(object(br#"["qemu"]"#)));
    let isolation = r#""backend":"fake","accel":"tcg","jail":"none","details":{}"#;
    add(host, None, fact("isolation", Digest::ZERO, isolation));
    add(host, None, fact("ready", Digest::ZERO, r#""boot_ms":1,"kernel_release":"6.1""#));
    add(guest, Some(vm), spawn(object(br#"["sh"]"#)));
    let told =
        Payload::CapabilityRequest { capability: Capability::FileWrite, granted: true, reason: said.into() };
    add(guest, Some(vm), told);
    let (changed, after) = ("/workspace/out.txt".into(), Digest::of(b"out"));
    let created = Payload::FileMutation { op: FileOp::Create, path: changed, before: Digest::ZERO, after };
    add(host, None, created);
    add(guest, Some(vm), Payload::ProcessExit { code: 0 });
    let root = part("root");
    let after = format!(r#""what":"root_after","digest":"{root}","bytes":1"#);
    add(host, None, fact("measured", root, &after));
    let gone = r#""verified":true,"ms":1,"checks":[{"what":"VMM process","gone":true,"detail":"reaped"}]"#;
    add(host, None, fact("teardown", Digest::ZERO, gone));
    add(vm, Some(host), Payload::ProcessExit { code: -9 });
    let verdict = r#""verdict":"ALLOWED","reasons":[],"timed_out":false"#;
    add(host, None, fact("verdict", Digest::ZERO, verdict));
    add(host, None, Payload::ProcessExit { code: 0 });
    add(host, None, Payload::RunEnd);
    let ledger = writer.close().unwrap();
    sealing::seal(path, run_id, &ledger, &SigningKey::from_seed(&[7; 32])).unwrap();
    dir
}
