//! Builds the guest's programs, static, and hands them to `hotcell` to embed.
//!
//! They need other flags than the host's programs (a static C library, abort on
//! panic), which cargo can't give to one package of a build; so they are built by
//! a cargo of their own into a folder of their own.

use std::path::{Path, PathBuf};
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-gnu";

fn main() {
    let here = PathBuf::from(var("CARGO_MANIFEST_DIR"));
    let (out, crates) =
        (PathBuf::from(var("OUT_DIR")), here.parent().map(Path::to_owned).unwrap_or_default());
    for source in ["guest", "wire", "sys"] {
        println!("cargo::rerun-if-changed={}", crates.join(source).display());
    }
    println!("cargo::rerun-if-changed={}", crates.join("../Cargo.lock").display());
    let mut build = Command::new(var("CARGO"));
    build.args([
        "build",
        "--release",
        "--locked",
        "--package",
        "hotcell-guest",
        "--bins",
        "--target",
        TARGET,
    ]);
    build.args(["--config", "profile.release.panic='abort'"]);
    build.arg("--manifest-path").arg(crates.join("guest/Cargo.toml"));
    build.arg("--target-dir").arg(out.join("guest"));
    // What the outer cargo set for this package must not reach the inner one.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let keep = ["CARGO", "CARGO_HOME", "CARGO_NET_OFFLINE", "CARGO_HTTP_CAINFO"];
        if text.starts_with("CARGO") && !keep.contains(&&*text) {
            build.env_remove(name);
        }
    }
    build.env_remove("RUSTC_WORKSPACE_WRAPPER").env_remove("RUSTC_WRAPPER");
    build.env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static -C strip=symbols");
    let done = build.status().unwrap_or_else(|error| panic!("can't start cargo for the guest: {error}"));
    assert!(done.success(), "the guest does not build (see above)");
    let built = out.join("guest").join(TARGET).join("release");
    for (name, variable) in [("hotcell-init", "HOTCELL_INIT"), ("hotcell-request", "HOTCELL_REQUEST")] {
        println!("cargo::rustc-env={variable}={}", built.join(name).display());
    }
}

fn var(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
