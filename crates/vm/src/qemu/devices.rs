//! What QEMU says of its machine, and what of that a machine of ours has.

use super::qmp::{Qmp, QmpError};
use crate::memory::{GuestMemory, MemoryRegion};
use serde_json::{Value, json};

/// The nodes that the guest may write to.
const WRITABLE_NODES: [&str; 2] = ["overlay", "overlay-file"];

/// Where the guest's memory lies in the VMM. The monitor's commands for people are the only ones that say it.
pub(super) fn memory_of(qmp: &mut Qmp) -> Result<Vec<MemoryRegion>, QmpError> {
    let mut say = |line: String| {
        let answer = qmp.call("human-monitor-command", json!({ "command-line": line }))?;
        Ok::<_, QmpError>(answer.as_str().unwrap_or_default().to_owned())
    };
    let mut regions = Vec::new();
    for (first, last) in GuestMemory::ranges(&say("info mtree -f".into())?) {
        let host = GuestMemory::host_address(&say(format!("gpa2hva {first:#x}"))?)
            .ok_or_else(|| QmpError::Protocol("gpa2hva".into()))?;
        regions.push(MemoryRegion { guest: first, host, bytes: last - first + 1 });
    }
    if regions.is_empty() {
        return Err(QmpError::Protocol("info mtree".into()));
    }
    Ok(regions)
}

/// Types of the objects in one place of QEMU's object tree.
pub(super) fn children(list: &Value) -> impl Iterator<Item = String> {
    list.as_array().into_iter().flatten().filter_map(|property| {
        let kind = property["type"].as_str()?;
        Some(kind.strip_prefix("child<")?.strip_suffix('>')?.to_owned())
    })
}

/// Types that a machine of ours consists of, as QEMU 7.2 to 10 name them. Anything
/// else, a network card above all, was not asked for.
const EXPECTED_DEVICES: &[&str] = &[
    "x86_64-cpu",
    "acpi-ged",
    "acpi-ged-x86",
    "apic",
    "container",
    "fw_cfg_io",
    "i8042",
    "i8259",
    "i8254",
    "ioapic",
    "irq",
    "isa-i8259",
    "isa-pit",
    "isa-serial",
    "isabus-bridge",
    "ISA",
    "kvmvapic",
    "kvm-apic",
    "kvm-i8259",
    "kvm-ioapic",
    "kvm-pit",
    "kvmclock",
    "mc146818rtc",
    "memory-backend-file",
    "memory-backend-memfd",
    "memory-backend-ram",
    "memory-region",
    "microvm-machine",
    "nvic",
    "System",
    "virtio-blk-device",
    "virtio-bus",
    "virtio-mmio",
    "virtio-mmio-bus",
    "virtio-serial-bus",
    "virtio-serial-device",
    "virtserialport",
];

pub(super) fn is_expected(kind: &str) -> bool {
    EXPECTED_DEVICES.contains(&kind) || kind.ends_with("-x86_64-cpu")
}

/// How far into any node but the workspace's something was written. Of a node QEMU counts no bytes, but where its
/// last written one lies.
pub(super) fn written_elsewhere(statistics: &Value) -> Option<u64> {
    let nodes = statistics.as_array()?.iter();
    let others = nodes.filter(|node| !WRITABLE_NODES.iter().any(|name| node["node-name"] == *name));
    others
        .map(|node| node["stats"]["wr_highest_offset"].as_u64())
        .try_fold(0, |most, one| Some(most.max(one?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_to_any_node_but_the_workspace_counts() {
        let node = |name: &str, end: u64| json!({"node-name": name, "stats": {"wr_bytes": 0, "wr_highest_offset": end}});
        let all = |root: u64, other: u64| {
            json!([node("overlay", 9), node("overlay-file", 9), node("root", root), node("x", other)])
        };
        for (root, other, counted) in [(0, 0, 0), (512, 0, 512), (0, 4608, 4608)] {
            assert_eq!(written_elsewhere(&all(root, other)), Some(counted));
        }
        assert_eq!(written_elsewhere(&json!([{"node-name": "root", "stats": {}}])), None);
        assert_eq!(written_elsewhere(&json!("no")), None);
    }

    #[test]
    fn no_network_card_of_qemu_is_expected() {
        for kind in [
            "virtio-net-device",
            "virtio-net-pci",
            "e1000",
            "e1000e",
            "i82550",
            "i82559er",
            "ne2k_pci",
            "ne2k_isa",
            "pcnet",
            "pvrdma",
            "rocker",
            "rtl8139",
            "tulip",
            "usb-net",
            "vmxnet3",
            "vhost-vsock-device",
            "vhost-user-vsock-device",
            "virtio-9p-device",
            "vhost-user-fs-device",
        ] {
            assert!(!is_expected(kind), "{kind}");
        }
        assert!(is_expected("max-x86_64-cpu") && is_expected("virtio-blk-device"));
    }
}
