//! From a bzImage to the ELF file in it.
//!
//! The setup header (`Documentation/arch/x86/boot.rst`) says where the compressed payload
//! lies; its last four bytes are the length of what it unpacks to.

use super::{KernelError, u16_at, u32_at};
use std::io::Read;

/// Largest kernel, unpacked. Distributions' have 40 to 80 MiB.
const MAX_VMLINUX: usize = 512 << 20;
const LZ4_LEGACY: u32 = 0x184c_2102;
/// What a block of the legacy format unpacks to at most (`lib/decompress_unlz4.c`).
const LZ4_BLOCK: usize = 8 << 20;

/// The ELF file in a bzImage; a file that is ELF already is taken as it is.
pub(crate) fn vmlinux(image: Vec<u8>) -> Result<Vec<u8>, KernelError> {
    if image.starts_with(b"\x7fELF") {
        return Ok(image);
    }
    let not = KernelError::NotBzImage;
    if image.get(0x202..0x206) != Some(b"HdrS") {
        return Err(not("it has no setup header"));
    }
    let version = u16_at(&image, 0x206).unwrap_or(0);
    if version < 0x208 {
        return Err(not("its boot protocol is older than 2.08"));
    }
    let sectors = match image.get(0x1f1) {
        Some(0) | None => 4,
        Some(count) => usize::from(*count),
    };
    let start = u32_at(&image, 0x248).map(|offset| (sectors + 1) * 512 + offset as usize);
    let length = u32_at(&image, 0x24c).map(|length| length as usize);
    let payload = start
        .zip(length)
        .and_then(|(start, length)| image.get(start..start.checked_add(length)?))
        .ok_or(not("its payload lies outside of it"))?;
    let (packed, size) = payload.split_last_chunk::<4>().ok_or(not("its payload is empty"))?;
    let size = u32::from_le_bytes(*size) as usize;
    if size > MAX_VMLINUX {
        return Err(KernelError::Corrupt(format!("it would have {size} bytes")));
    }
    let elf = match packed {
        [0x02, 0x21, 0x4c, 0x18, ..] => lz4(packed, size)?,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => {
            let reader = ruzstd::decoding::StreamingDecoder::new(packed)
                .map_err(|error| KernelError::Corrupt(error.to_string()))?;
            read(reader, size)?
        }
        [0x1f, 0x8b, ..] => read(flate2::read::GzDecoder::new(packed), size)?,
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => return Err(KernelError::Compression("xz")),
        [b'B', b'Z', b'h', ..] => return Err(KernelError::Compression("bzip2")),
        [0x5d, 0, 0, ..] => return Err(KernelError::Compression("lzma")),
        _ => return Err(KernelError::Compression("an unknown method")),
    };
    if elf.len() != size || !elf.starts_with(b"\x7fELF") {
        return Err(KernelError::Corrupt(
            "what comes out is not the ELF file that its header tells of".into(),
        ));
    }
    Ok(elf)
}

fn read(reader: impl Read, size: usize) -> Result<Vec<u8>, KernelError> {
    let mut out = Vec::with_capacity(size);
    let mut bounded = reader.take(size as u64 + 1);
    bounded.read_to_end(&mut out).map_err(|error| KernelError::Corrupt(error.to_string()))?;
    Ok(out)
}

/// The legacy format: blocks, each behind its packed length.
fn lz4(packed: &[u8], size: usize) -> Result<Vec<u8>, KernelError> {
    let corrupt = |what: &str| KernelError::Corrupt(what.into());
    let mut out = vec![0; size];
    let (mut at, mut done) = (4, 0);
    while done < size {
        let length = u32_at(packed, at).ok_or_else(|| corrupt("it ends early"))?;
        at += 4;
        // Another magic: streams may be concatenated.
        if length == LZ4_LEGACY {
            continue;
        }
        let block = at.checked_add(length as usize).and_then(|end| packed.get(at..end));
        let block = block.ok_or_else(|| corrupt("a block lies outside of it"))?;
        let end = size.min(done + LZ4_BLOCK);
        let room = out.get_mut(done..end).ok_or_else(|| corrupt("it is longer than it says"))?;
        let count =
            lz4_flex::block::decompress_into(block, room).map_err(|error| corrupt(&error.to_string()))?;
        if count == 0 {
            return Err(corrupt("an empty block"));
        }
        done += count;
        at += length as usize;
    }
    Ok(out)
}
