//! Parses numbers of command lines, with their bounds.

/// The most threads that an archive is read or written with.
const MAX_THREADS: usize = 32;
const MAX_SECONDS: u64 = 7 * 24 * 3600;

/// Parses a number of threads; 0: as many as there are cores.
pub fn threads(text: &str) -> Result<usize, String> {
    let threads = text.parse().ok().filter(|n| *n <= MAX_THREADS);
    threads.ok_or_else(|| format!("it is not within 0 and {MAX_THREADS}"))
}

/// Parses a time limit in seconds.
pub fn seconds(text: &str) -> Result<u64, String> {
    let seconds = text.parse().ok();
    let seconds = seconds.filter(|n| (1..=MAX_SECONDS).contains(n));
    seconds.ok_or_else(|| format!("it is not within 1 and {MAX_SECONDS} seconds (7 days)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds() {
        assert_eq!((threads("0"), threads("32")), (Ok(0), Ok(32)));
        assert_eq!((seconds("1"), seconds("604800")), (Ok(1), Ok(604_800)));
        assert!(threads("33").is_err() && threads("-1").is_err());
        for text in ["0", "604801", "18446744073709551615", "1h"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
