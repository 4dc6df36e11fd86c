//! A kernel file's own tables, damaged: type information, symbols, and the image around them.
#![no_main]

use hotcell_observe::kernel::{Profile, symbol_address, type_offset};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = type_offset(data, "task_struct", "tasks");
    let _ = type_offset(data, "a", "b.c");
    let _ = symbol_address(data, 0xffff_ffff_8100_0000, "_text");
    let _ = Profile::read(data.to_vec());
    let mut elf = b"\x7fELF\x02\x01".to_vec();
    elf.extend_from_slice(data);
    let _ = Profile::read(elf);
});
