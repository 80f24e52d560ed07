//! Decides whether entropy coding is worth its time.
//!
//! Pages of noise and zeros shrink through their repetitions alone. The bytes between the repetitions are evenly
//! distributed. An entropy coder works on them for a long time and gains nothing: four times as long, for the same
//! size.

/// Length of a run of sampled bytes, and the distance between runs. Neither divides a page.
const RUN: usize = 61;
const STRIDE: usize = 16_183;
/// Fewer samples are not significant.
const ENOUGH: u64 = 512;

/// Returns true if the bytes, except the most frequent one, are evenly distributed. Samples every 16 KiB at fixed
/// places, in integers: the answer depends only on the data.
pub(super) fn even(data: &[u8]) -> bool {
    let mut counts = [0u64; 256];
    for run in data.chunks(STRIDE) {
        for byte in run.iter().take(RUN) {
            counts[usize::from(*byte)] += 1;
        }
    }
    if let Some(most) = counts.iter_mut().max() {
        *most = 0;
    }
    let n: u64 = counts.iter().sum();
    if n < ENOUGH {
        return false;
    }
    // The sum of squares of n evenly distributed bytes is n * n / 256 + n on average; a quarter more is allowed.
    let squares: u64 = counts.iter().map(|c| c * c).sum();
    squares * 1024 <= 5 * n * n + 1024 * n
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize) -> Vec<u8> {
        let mut x = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 32) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    #[test]
    fn noise_alone_and_between_zeros() {
        let mut data = noise(1 << 20);
        assert!(even(&data));
        for page in data.chunks_mut(4096) {
            page[2048..].fill(0);
        }
        assert!(even(&data));
    }

    #[test]
    fn what_an_entropy_coder_shrinks() {
        assert!(!even(&[]));
        assert!(!even(&vec![0; 1 << 20]));
        let text: Vec<u8> = (0..200_000)
            .flat_map(|n: u32| n.to_string().into_bytes())
            .collect();
        assert!(!even(&text));
        // Half numbers in text, half noise.
        let mut half = noise(1 << 20);
        half[..1 << 19].copy_from_slice(&text[..1 << 19]);
        assert!(!even(&half));
        // Floating point numbers: an exponent with few values beside an evenly distributed mantissa.
        let mut floats = noise(1 << 20);
        for (n, exponent) in floats.iter_mut().skip(3).step_by(4).enumerate() {
            *exponent = 0x3c + (n % 4) as u8;
        }
        assert!(!even(&floats));
    }
}
