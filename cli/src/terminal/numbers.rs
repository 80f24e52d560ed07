//! Parses numbers of command lines, with their bounds.

/// The most threads that an archive is read or written with.
const MAX_THREADS: usize = 32;
const MAX_SECONDS: u64 = 7 * 24 * 3600;

/// Parses a number of threads; 0: as many as there are cores. More are as many as there can be.
pub fn threads(text: &str) -> Result<usize, String> {
    let threads = text.parse().map(|n: usize| n.min(MAX_THREADS));
    threads.map_err(|e| e.to_string())
}

/// Parses a time limit in seconds, of 7 days at most.
pub fn seconds(text: &str) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(0) => Err("nothing is done within 0 seconds".into()),
        Ok(seconds) => Ok(seconds.min(MAX_SECONDS)),
        Err(e) => Err(e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds() {
        assert_eq!((threads("0"), threads("224")), (Ok(0), Ok(32)));
        assert_eq!((seconds("1"), seconds("999999")), (Ok(1), Ok(604_800)));
        assert_eq!(seconds("18446744073709551615"), Ok(604_800));
        assert!(threads("-1").is_err());
        for text in ["0", "-1", "1h", ""] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
