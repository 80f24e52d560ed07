//! Is it worth while to give bytes shorter codes by how often they come?
//!
//! Pages of noise and zeros shrink by their repetitions alone. What is left between them are evenly distributed bytes,
//! at which an entropy coder works for a long time and gains nothing: four times as long, for the same size.

/// Bytes that are looked at together, and how far apart. Both are odd to pages.
const RUN: usize = 61;
const STRIDE: usize = 16_183;
/// Fewer bytes tell nothing.
const ENOUGH: u64 = 512;

/// Are the bytes, but for the most frequent one, evenly distributed? A sample of every 16 KiB decides, always the
/// same one, in whole numbers: the answer depends on nothing but the data.
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
    // The sum of squares of n even bytes is n * n / 256 + n on average; a quarter more is allowed.
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
        // Floating point numbers: an exponent of few values beside an even mantissa.
        let mut floats = noise(1 << 20);
        for (n, exponent) in floats.iter_mut().skip(3).step_by(4).enumerate() {
            *exponent = 0x3c + (n % 4) as u8;
        }
        assert!(!even(&floats));
    }
}
