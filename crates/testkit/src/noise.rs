//! Bytes that look random and can be made again.

/// A stream of bytes from a seed.
#[derive(Clone, Debug)]
pub struct Noise {
    state: u64,
}

impl Noise {
    /// The stream of this seed.
    pub fn new(seed: u64) -> Noise {
        Noise { state: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1 }
    }

    /// Fills a buffer; whole words are drawn, so ask in multiples of eight to be independent of the cutting.
    pub fn fill(&mut self, into: &mut [u8]) {
        for part in into.chunks_mut(8) {
            // xorshift64 (Marsaglia, 2003).
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            part.copy_from_slice(&self.state.to_le_bytes()[..part.len()]);
        }
    }

    /// The first bytes of a seed's stream.
    pub fn bytes(seed: u64, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        Noise::new(seed).fill(&mut bytes);
        bytes
    }
}
