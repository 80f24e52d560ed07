//! Watches how far the driver has filled memory.
//!
//! At a checkpoint the driver (580) fills its memory strictly from the start to the end, in one stream; 16 MiB are complete
//! within 21 ms. So what lies well below the highest byte that is not zero is probably complete. It need not be: whoever
//! writes the memory checks in the end what has changed.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// How far what is probably complete lies below the highest byte that is not zero.
const LAG: usize = 128 << 20;
/// Distance between the bytes that are looked at.
const STEP: usize = 64 << 10;
/// How far above the front to look each time.
const NEAR: usize = 256 << 20;
/// How often to look at all the rest, and at which distances: zeros may lie in between.
const FAR_EVERY: u32 = 256;
const FAR_STEP: usize = 1 << 20;
const PAUSE: Duration = Duration::from_millis(2);

/// Keeps `filled` up to date until `over`: for each memory the bytes from its start that are probably complete.
pub fn watch(memory: &[&[u8]], filled: &[&AtomicUsize], over: &AtomicBool) {
    let mut fronts = vec![0; memory.len()];
    let mut round = 0u32;
    while !over.load(Relaxed) {
        for ((memory, front), filled) in memory.iter().zip(&mut fronts).zip(filled) {
            *front = highest(memory, *front, NEAR, STEP);
            if round % FAR_EVERY == FAR_EVERY - 1 {
                *front = highest(memory, *front, memory.len(), FAR_STEP);
            }
            filled.store(front.saturating_sub(LAG), Relaxed);
        }
        round = round.wrapping_add(1);
        std::thread::sleep(PAUSE);
    }
}

/// The highest place above `from` that is not zero, within a range; else `from`.
fn highest(memory: &[u8], from: usize, range: usize, step: usize) -> usize {
    let end = from.saturating_add(range).min(memory.len());
    let places = (from..end).step_by(step).skip(1);
    places.fold(from, |found, at| match is_set(memory, at) {
        true => at,
        false => found,
    })
}

fn is_set(memory: &[u8], at: usize) -> bool {
    // Volatile: another program changes it.
    // SAFETY: a reference to a byte, by its type.
    let read = |byte: &u8| unsafe { std::ptr::from_ref(byte).read_volatile() };
    memory[at..].iter().take(8).any(|byte| read(byte) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_is_the_highest_byte() {
        let mut memory = vec![0u8; 4 << 20];
        assert_eq!(highest(&memory, 0, NEAR, STEP), 0);
        memory[..1 << 20].fill(1);
        let front = highest(&memory, 0, NEAR, STEP);
        assert_eq!(front, (1 << 20) - STEP);
        // Zeros in between.
        memory[3 << 20..].fill(1);
        assert_eq!(highest(&memory, front, 1 << 20, STEP), front);
        assert_eq!(highest(&memory, front, NEAR, STEP), memory.len() - STEP);
        assert_eq!(highest(&memory, memory.len(), NEAR, STEP), memory.len());
        assert_eq!(highest(&[1, 1], 0, NEAR, 1), 1);
    }
}
