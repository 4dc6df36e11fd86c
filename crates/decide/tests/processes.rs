//! Which processes may be there: each line of the module's tables, and the near miss of each.

use hotcell_decide::process::Finding;
use hotcell_decide::{Executable, Life, Place, Process, ProcessRules, ViolationKind};

fn rules() -> ProcessRules {
    ProcessRules {
        approved: Some(["/bin/sh", "/usr/sbin/served", "/usr/bin/python3"].map(str::to_owned).into()),
        services: ["/usr/sbin/served", "/usr/sbin/script"].map(str::to_owned).into(),
        workspace_executes: false,
    }
}

fn running(place: Place, path: &str) -> Life {
    Life::Running(Some(Executable { path: path.into(), place, noexec: false }))
}

fn process(uid: u32, capabilities: u64, life: Life) -> Process {
    Process {
        pid: 7,
        tgid: 7,
        parent: 1,
        start_ns: 1,
        name: "x".into(),
        uids: [uid; 4],
        gid: uid,
        capabilities,
        seccomp: 2,
        life,
        argv: Vec::new(),
    }
}

fn kind(finding: Option<Finding>) -> Option<ViolationKind> {
    finding.map(|finding| finding.kind)
}

#[track_caller]
fn judged(process: &Process) -> Option<ViolationKind> {
    kind(rules().judge(process, None))
}

#[test]
fn privilege_needs_an_explanation() {
    let unexplained = Some(ViolationKind::UnexplainedPrivilege);
    let shell = || running(Place::Root, "/bin/sh");
    assert_eq!(judged(&process(1000, 0, shell())), None);
    assert_eq!(judged(&process(0, 0, shell())), unexplained);
    assert_eq!(judged(&process(1000, 1, shell())), unexplained);
    for one in 0..4 {
        let mut one_id = process(1000, 0, shell());
        one_id.uids[one] = 0;
        assert_eq!(judged(&one_id), unexplained, "user id {one}");
    }
    assert_eq!(judged(&process(0, u64::MAX, Life::KernelThread)), None);
    assert_eq!(judged(&process(0, u64::MAX, running(Place::Initramfs, "/init"))), None);
    assert_eq!(judged(&process(0, 0, running(Place::Root, "/usr/sbin/served"))), None);
    // Of the same path on another file system: another file.
    assert_eq!(judged(&process(0, 0, running(Place::Workspace, "/usr/sbin/served"))), unexplained);
    assert_eq!(judged(&process(0, 0, running(Place::Elsewhere("tmpfs".into()), "/init"))), unexplained);
}

#[test]
fn a_script_is_the_service_that_its_first_argument_names() {
    let script = |argv: &[&str]| {
        let mut process = process(0, 0, running(Place::Root, "/bin/sh"));
        process.argv = argv.iter().map(|&word| word.to_owned()).collect();
        judged(&process)
    };
    assert_eq!(script(&["/bin/sh", "/usr/sbin/script", "--loud"]), None);
    for other in [&["sh", "-c", "/usr/sbin/script"][..], &["/usr/sbin/script"], &["sh"], &[]] {
        assert_eq!(script(other), Some(ViolationKind::UnexplainedPrivilege), "{other:?}");
    }
    let asked = |life, uid| rules().asks_for_argv(&process(uid, 0, life));
    assert!(asked(running(Place::Root, "/bin/sh"), 0));
    assert!(!asked(running(Place::Root, "/bin/sh"), 1000) && !asked(Life::KernelThread, 0));
}

#[test]
fn what_has_no_memory_is_explained_by_its_parent_alone() {
    let ending = process(0, 0, Life::NoMemory);
    let by = |life| kind(rules().judge(&ending, Some(&process(0, 0, life))));
    assert_eq!(by(Life::KernelThread), None);
    assert_eq!(by(running(Place::Initramfs, "/init")), None);
    assert_eq!(by(running(Place::Root, "/usr/sbin/served")), None);
    let unexplained = Some(ViolationKind::UnexplainedPrivilege);
    assert_eq!(by(running(Place::Root, "/bin/sh")), unexplained);
    assert_eq!(by(Life::NoMemory), unexplained);
    assert_eq!(judged(&ending), unexplained, "without a parent");
    assert_eq!(judged(&process(1000, 0, Life::NoMemory)), None);
}

#[test]
fn a_file_must_be_approved_and_its_mount_must_execute() {
    let at = |place, path, noexec| {
        let executable = Executable { path: String::from(path), place, noexec };
        process(1000, 0, Life::Running(Some(executable)))
    };
    let (unapproved, noexec) =
        (Some(ViolationKind::UnapprovedExecutable), Some(ViolationKind::ExecutedFromNoexec));
    assert_eq!(judged(&at(Place::Root, "/bin/sh", false)), None);
    assert_eq!(judged(&at(Place::Root, "/bin/other", false)), unapproved);
    assert_eq!(judged(&at(Place::Initramfs, "/init", false)), None);
    assert_eq!(judged(&at(Place::Workspace, "/a.out", true)), noexec);
    // A workspace that may not execute and is mounted so that it could is no better.
    assert_eq!(judged(&at(Place::Workspace, "/a.out", false)), noexec);
    assert_eq!(judged(&at(Place::Elsewhere("tmpfs".into()), "/a.out", true)), noexec);
    assert_eq!(judged(&at(Place::Elsewhere("memfd".into()), "/a.out", false)), unapproved);
    assert_eq!(judged(&process(1000, 0, Life::Running(None))), unapproved);
    let open = ProcessRules { approved: None, workspace_executes: true, ..rules() };
    for fine in [at(Place::Workspace, "/a.out", false), at(Place::Root, "/bin/other", false)] {
        assert_eq!(kind(open.judge(&fine, None)), None);
    }
    let elsewhere = at(Place::Elsewhere("tmpfs".into()), "/a.out", true);
    assert_eq!(kind(open.judge(&elsewhere, None)), noexec);
}

#[test]
fn a_finding_says_who_and_from_where() {
    let finding = rules().judge(&process(0, 0x20, running(Place::Root, "/bin/sh")), None).unwrap();
    assert_eq!(finding.subject, "process 7 \"x\"");
    assert_eq!(finding.detail, "users 0 0 0 0, capabilities 0x20, running from /bin/sh, parent 1");
}
