//! The content of the image: any sector that is read back shows whether it is the right one.
//!
//! A sector begins with its own byte offset and the generation of its writer (little-endian words);
//! the rest depends on the place within the sector. So the data of a write is made current by
//! changing two words a sector, which costs the light client little.

/// Bytes in a sector, the unit that identifies itself.
pub const SECTOR: usize = 512;
const WORD: usize = 8;
const STAMP: usize = 2 * WORD;

/// Makes `block` the content of an image at byte `offset`, written by `generation`.
pub fn fill(block: &mut [u8], offset: u64, generation: u64) {
    for sector in block.chunks_exact_mut(SECTOR) {
        for (index, word) in sector.chunks_exact_mut(WORD).enumerate() {
            word.copy_from_slice(&body_word(index).to_le_bytes());
        }
        sector[WORD..STAMP].copy_from_slice(&generation.to_le_bytes());
    }
    move_to(block, offset);
}

/// Turns the filled `block` into the content for another `offset`, of the same generation.
pub fn move_to(block: &mut [u8], offset: u64) {
    for (index, sector) in block.chunks_exact_mut(SECTOR).enumerate() {
        let own = offset + (index * SECTOR) as u64;
        sector[..WORD].copy_from_slice(&own.to_le_bytes());
    }
}

/// Turns the filled `block` into one of another `generation`.
pub fn stamp(block: &mut [u8], generation: u64) {
    for sector in block.chunks_exact_mut(SECTOR) {
        sector[WORD..STAMP].copy_from_slice(&generation.to_le_bytes());
    }
}

/// Checks a block that was read at `offset`, and its generation if one is given.
///
/// # Errors
/// The error says which sector is wrong, and how.
pub fn verify(block: &[u8], offset: u64, generation: Option<u64>) -> Result<(), String> {
    for (index, sector) in block.chunks_exact(SECTOR).enumerate() {
        let expected = offset + (index * SECTOR) as u64;
        let found = word(sector, 0);
        if found != expected {
            return Err(format!("sector at offset {expected} holds the data of offset {found}"));
        }
        if let Some(generation) = generation
            && word(sector, 1) != generation
        {
            return Err(format!("sector at offset {expected} was acknowledged but not written"));
        }
        let body = (STAMP / WORD..SECTOR / WORD).find(|&at| word(sector, at) != body_word(at));
        if let Some(at) = body {
            return Err(format!("byte {} is not what was written", expected + (at * WORD) as u64));
        }
    }
    Ok(())
}

fn word(sector: &[u8], index: usize) -> u64 {
    let mut bytes = [0; WORD];
    bytes.copy_from_slice(&sector[index * WORD..(index + 1) * WORD]);
    u64::from_le_bytes(bytes)
}

fn body_word(index: usize) -> u64 {
    (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_verifies_only_where_it_belongs() {
        let mut block = vec![0; 4096];
        fill(&mut block, 8192, 3);
        assert_eq!(verify(&block, 8192, Some(3)), Ok(()));
        assert!(verify(&block, 8192, Some(4)).is_err());
        assert!(verify(&block, 4096, None).is_err());
        move_to(&mut block, 4096);
        assert_eq!(verify(&block, 4096, None), Ok(()));
        stamp(&mut block, 4);
        assert_eq!(verify(&block, 4096, Some(4)), Ok(()));
        block[4095] ^= 1;
        assert!(verify(&block, 4096, None).unwrap_err().contains("8184"));
    }
}
