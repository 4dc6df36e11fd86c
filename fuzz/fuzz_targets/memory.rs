//! Guest memory that is these bytes over and over, so that every pointer leads somewhere: walking it ends.
#![no_main]

use hotcell_observe::kernel::{JumpEntry, Offsets, Profile, Symbols};
use hotcell_observe::ram::{
    Guard, Mapping, Places, Processors, ReadError, Region, Source, Space, TaskReader, Views, find_nonce, locate, net_devices,
};
use hotcell_sys::host::Range;
use libfuzzer_sys::fuzz_target;

struct Memory {
    bytes: Vec<u8>,
    regions: [Region; 1],
}

impl Source for Memory {
    fn regions(&self) -> &[Region] {
        &self.regions
    }

    fn read(&self, ranges: &[Range], into: &mut [u8]) -> Result<(), ReadError> {
        let places = ranges.iter().flat_map(|range| (0..range.bytes).map(|at| range.address as usize + at));
        for (to, from) in into.iter_mut().zip(places) {
            *to = self.bytes[from % self.bytes.len()];
        }
        Ok(())
    }
}

const LINKED: u64 = 0xffff_ffff_8100_0000;
const DIRECT: u64 = 0xffff_8880_0000_0000;

fn profile() -> Profile {
    let json = serde_json::to_value(Offsets::default()).unwrap();
    let names = json.as_object().unwrap().keys().cloned();
    let spread: serde_json::Map<_, _> = names.zip(0u32..).map(|(name, at)| (name, (at * 8 % 160).into())).collect();
    let mut offsets: Offsets = serde_json::from_value(spread.into()).unwrap();
    offsets.xa_marks = offsets.xa_slots + 16 * 8;
    let at = |inside: u64| LINKED + inside;
    let symbols = Symbols {
        text: LINKED,
        stext: LINKED,
        etext: at(0x1000),
        start_rodata: at(0x1000),
        end_rodata: at(0x2000),
        end: at(0x10_0000),
        phys_base: at(0x4000),
        init_top_pgt: at(0x5000),
        page_offset_base: at(0x4008),
        linux_banner: at(0x2100),
        init_task: at(0x6000),
        init_pid_ns: at(0x7000),
        tasklist_lock: at(0x7400),
        runqueues: 0x100,
        per_cpu_offset: at(0x7500),
        modules: at(0x7100),
        net_namespace_list: at(0x7200),
        super_blocks: at(0x7300),
        idt_table: at(0x8000),
        sys_call_table: at(0x1100),
        entry_syscall: at(0x100),
    };
    Profile {
        offsets,
        symbols,
        banner: "Linux version ".into(),
        jumps: vec![JumpEntry { code: 0x100, target: 0x180 }, JumpEntry { code: 0xffd, target: 0x200 }],
        calls: vec![0x300],
        functions: vec![0x400],
    }
}

fuzz_target!(|data: &[u8]| {
    if data.len() < 64 {
        return;
    }
    let memory = Memory { bytes: data.to_vec(), regions: [Region { guest: 0, host: 0, bytes: 16 << 20 }] };
    let profile = profile();
    let _ = locate(&memory, &profile);
    for levels in [4, 5] {
        let mapping = Mapping {
            text: LINKED,
            text_physical: 0x20_0000,
            image_bytes: 1 << 20,
            direct: DIRECT,
            tables: 0x1000,
            levels,
        };
        let space = Space::new(&memory, mapping);
        let mut reader = TaskReader::default();
        for _ in 0..2 {
            let _ = reader.sweep(&space, &profile, &Places::default());
        }
        let processors = Processors::find(&space, &profile).unwrap_or_default();
        if let Ok(views) = Views::read(&space, &profile, &processors, reader.tasks()) {
            let _ = views.suspects(&space, &profile, reader.tasks());
        }
        let _ = net_devices(&space, &profile);
        let _ = find_nonce(&space, 0x2000, b"mark");
        if let Ok(mut guard) = Guard::new(&space, &profile, [data[0]; 32]) {
            assert_eq!(guard.look(&space, &profile).unwrap().iter().filter(|c| c.detail.contains("not what they were")).count(), 0);
        }
    }
});
