//! Refuses memory pages compressed with LZ4 (CRIU 4.3 and newer can write them) where this host's CRIU cannot read
//! them.

use crate::criu::elf;
use cryopod_archive::criu;
use cryopod_gpu_plan::refusal::Refusal;

use crate::criu::{Criu, numbers};

const FIRST: [u32; 2] = [4, 3];

/// Returns why this CRIU cannot restore these images; `None` if their pages are plain, or it can.
pub fn of_inventory(inventory: &[u8], criu: Option<&Criu>) -> Option<Refusal> {
    // CRIU itself reports a damaged image.
    refusal(
        criu::has_compressed_pages(inventory).unwrap_or(false),
        criu?,
    )
}

/// Refuses compressed images that this CRIU cannot read.
pub fn refusal(is_compressed: bool, criu: &Criu) -> Option<Refusal> {
    if !is_compressed {
        return None;
    }
    let version = criu.version.as_deref();
    let older = version
        .and_then(numbers)
        .is_some_and(|n| n.iter().take(2).lt(FIRST.iter()));
    let why = if older {
        "is too old to read"
    } else if elf::criu(&criu.path).is_ok_and(|elf| !elf.lz4) {
        "was built without LZ4, which it needs to read"
    } else {
        return None;
    };
    Some(Refusal::new(
        format!(
            "CRIU {} at {} {why} the compressed memory pages of this checkpoint",
            version.unwrap_or("of an unknown version"),
            criu.path.display()
        ),
        "restore with a CRIU of version 4.3 or newer that was built with LZ4, or checkpoint without CRIU's option `compress`",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::process::Command;

    /// `inventory.img` of image version 3 with `compress` (field 15).
    fn inventory(compress: u8) -> Vec<u8> {
        let message = [0x08, 3, 0x78, compress];
        let mut image = Vec::new();
        for word in [0x5456_4319_u32, 0x5831_3116, 4] {
            image.extend(word.to_le_bytes());
        }
        image.extend(message);
        image
    }

    fn criu(version: &str, path: &Path) -> Criu {
        Criu {
            path: path.to_owned(),
            version: Some(version.into()),
        }
    }

    #[test]
    fn a_criu_that_cannot_read_them() {
        let dir = tempfile::tempdir().unwrap();
        let built = |name: &str, source: &str| {
            let (c, out) = (dir.path().join("x.c"), dir.path().join(name));
            std::fs::write(&c, source).unwrap();
            let mut cc = Command::new("cc");
            let done = cc
                .args(["-shared", "-fPIC", "-o"])
                .arg(&out)
                .arg(&c)
                .status();
            assert!(done.unwrap().success());
            out
        };
        let with = built("with", "int LZ4_decompress_safe(void) { return 0; }\n");
        let without = built(
            "without",
            "int page_read_range_has_lz4(void) { return 0; }\n",
        );
        let script = dir.path().join("script");
        std::fs::write(&script, "#!/bin/sh\n").unwrap();
        let why = |compress, version: &str, path: &Path| {
            let refusal = of_inventory(&inventory(compress), Some(&criu(version, path)));
            refusal.map(|r| r.what)
        };
        assert_eq!(why(0, "4.2.1", &without), None);
        assert_eq!(why(1, "4.3", &with), None);
        assert_eq!(why(2, "5.0", &script), None, "not known");
        for (path, version, want) in [
            (&with, "4.2.1", "CRIU 4.2.1 at"),
            (
                &with,
                "4.2.1",
                "is too old to read the compressed memory pages",
            ),
            (&without, "4.3", "was built without LZ4"),
        ] {
            let said = why(2, version, path).unwrap();
            assert!(said.contains(want), "{said}");
        }
        assert_eq!(of_inventory(b"", Some(&criu("4.1", &with))), None);
    }
}
