//! Which accelerator a machine gets.

use crate::measured::remember;
use crate::process::boot_id;
use hotcell_sys::host::{KvmProbe, probe_kvm};
use std::fmt;
use std::fs;
use std::path::Path;

/// What the operator asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AccelChoice {
    /// KVM where it really executes guest code, else TCG; always said which.
    #[default]
    Auto,
    /// KVM or no run.
    Kvm,
    /// TCG.
    Tcg,
}

/// What executes guest code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// Hardware virtualisation.
    Kvm,
    /// QEMU's translator: slower, and its correctness is what isolates.
    Tcg,
}

impl Accel {
    /// `kvm` or `tcg`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
        }
    }
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A decided accelerator and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acceleration {
    /// Which.
    pub accel: Accel,
    /// Why, for people and for the record.
    pub why: String,
}

/// KVM was asked for and is not to be had.
#[derive(Debug, thiserror::Error)]
#[error(
    "KVM was asked for but can't be used: {0}. Use `--accel auto` or `--accel tcg`, or a host with hardware virtualisation"
)]
pub struct AccelRefused(String);

impl AccelRefused {
    /// Why it is not to be had.
    pub fn why(&self) -> &str {
        &self.0
    }
}

impl AccelChoice {
    /// Decides, by trying KVM where it matters.
    ///
    /// # Errors
    /// KVM was asked for and does not execute guest code at speed.
    pub fn resolve(self) -> Result<Acceleration, AccelRefused> {
        self.resolve_with(probe_kvm)
    }

    /// The same; that KVM is too slow here is remembered in `cache` until the host boots again, since to
    /// find it out takes a hundred times as long as to find a KVM that works. Asked for by name, it is always tried.
    ///
    /// # Errors
    /// As [`AccelChoice::resolve`].
    pub fn resolve_remembering(self, cache: &Path) -> Result<Acceleration, AccelRefused> {
        let memory = cache.join("kvm-too-slow");
        let boot = boot_id().unwrap_or_default();
        if self == AccelChoice::Auto && !boot.is_empty() {
            let known = fs::read_to_string(&memory).unwrap_or_default();
            if let Some(rounds) =
                known.strip_prefix(&format!("{boot} ")).and_then(|rest| rest.trim().parse().ok())
            {
                return self.resolve_with(|| KvmProbe::TooSlow { rounds_per_second: rounds });
            }
        }
        self.resolve_with(|| {
            let probe = probe_kvm();
            if let KvmProbe::TooSlow { rounds_per_second } = probe {
                // Whoever can't remember tries again.
                let _ = remember(&memory, format!("{boot} {rounds_per_second}\n").as_bytes());
            }
            probe
        })
    }

    fn resolve_with(self, probe: impl FnOnce() -> KvmProbe) -> Result<Acceleration, AccelRefused> {
        if self == AccelChoice::Tcg {
            return Ok(Acceleration { accel: Accel::Tcg, why: "asked for".into() });
        }
        let why = match probe() {
            KvmProbe::Usable { rounds_per_second } => {
                let why = format!("guest code runs at {} M rounds/s", rounds_per_second / 1_000_000);
                return Ok(Acceleration { accel: Accel::Kvm, why });
            }
            KvmProbe::TooSlow { rounds_per_second } => format!(
                "/dev/kvm exists, but guest code runs at only {} k rounds/s: no hardware virtualisation stands behind it",
                rounds_per_second / 1_000
            ),
            KvmProbe::Unusable(why) => why,
        };
        match self {
            AccelChoice::Kvm => Err(AccelRefused(why)),
            _ => Ok(Acceleration { accel: Accel::Tcg, why }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn that_kvm_is_too_slow_is_known_until_the_next_boot_and_for_auto_alone() {
        let home = tempfile::tempdir().unwrap();
        let memory = home.path().join("kvm-too-slow");
        // A figure that no probe gives shows where the answer comes from.
        fs::write(&memory, format!("{} 123456\n", boot_id().unwrap())).unwrap();
        let known = AccelChoice::Auto.resolve_remembering(home.path()).unwrap();
        assert!(known.accel == Accel::Tcg && known.why.contains("123 k rounds/s"), "{known:?}");
        fs::write(&memory, "another-boot 123456\n").unwrap();
        let tried = AccelChoice::Auto.resolve_remembering(home.path()).unwrap();
        assert!(!tried.why.contains("123 k rounds/s"), "{tried:?}");
    }

    #[test]
    fn kvm_is_used_only_when_it_runs_code() {
        let usable = || KvmProbe::Usable { rounds_per_second: 900_000_000 };
        let slow = || KvmProbe::TooSlow { rounds_per_second: 600_000 };
        let absent = || KvmProbe::Unusable("/dev/kvm: no such file".into());
        assert_eq!(AccelChoice::Auto.resolve_with(usable).unwrap().accel, Accel::Kvm);
        assert_eq!(AccelChoice::Kvm.resolve_with(usable).unwrap().accel, Accel::Kvm);
        assert_eq!(AccelChoice::Auto.resolve_with(slow).unwrap().accel, Accel::Tcg);
        assert_eq!(AccelChoice::Auto.resolve_with(absent).unwrap().accel, Accel::Tcg);
        assert!(AccelChoice::Kvm.resolve_with(slow).unwrap_err().to_string().contains("no hardware"));
        assert!(AccelChoice::Kvm.resolve_with(absent).unwrap_err().to_string().contains("no such file"));
        let never = || unreachable!("TCG needs no probe");
        assert_eq!(AccelChoice::Tcg.resolve_with(never).unwrap().accel, Accel::Tcg);
    }
}
