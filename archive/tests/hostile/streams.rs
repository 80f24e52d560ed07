//! Cut off, damaged and swollen streams.

use cryopod_archive::format::limits::Limits;

use crate::common::noise;
use crate::make::*;
use crate::{Count, INVENTORY};

#[test]
fn cut_off_everywhere() {
    let mut count = Count::default();
    let cut = |tar: Tar, at: usize| write(tar.0[..at].to_vec());
    let good = Tar::good();
    let header = good.len();
    let tar = good.file("checkpoint/pages-1.img", &noise(1, 5000));
    refused! { count:
        "in the middle of a tar header" => cut(tar.clone(), header + 100);
        "bytes too early" => cut(tar.clone(), header + 512 + 3000);
        "bytes too early" => cut(tar.clone(), tar.len() - 10);
        "no end mark" => cut(tar.clone(), tar.len());
    }
    let pax = Tar::good().pax(&[("path", "checkpoint/x")]);
    count.refused(
        "in the middle of a tar header",
        cut(pax.clone(), pax.len() - 300),
    );
    count.refused("no end mark", write(pax.0));
    let whole = tar.end();
    let (frames, gz) = (zstd(&whole), gzip(&whole));
    for at in [frames.len() - 1, frames.len() / 2] {
        count.refused(
            "zstd data cannot be decompressed",
            write(frames[..at].to_vec()),
        );
    }
    for at in [gz.len() - 1, gz.len() / 2] {
        count.refused("gzip data cannot be decompressed", write(gz[..at].to_vec()));
    }
    let mut flipped = frames.clone();
    let last = flipped.len() - 2;
    flipped[last] ^= 1; // the checksum
    count.refused("zstd data cannot be decompressed", write(flipped));
    let mut flipped = gz.clone();
    let last = flipped.len() - 6;
    flipped[last] ^= 1; // the checksum
    count.refused("gzip data cannot be decompressed", write(flipped));
    count.refused(
        "zstd data cannot be decompressed",
        write([&frames[..], b"garbage after it"].concat()),
    );
    let skip = [&frames[..], b"\x50\x2a\x4d\x18\xff\xff\xff\xff"].concat();
    count.refused("zstd data cannot be decompressed", write(skip));
    // A frame that says 256 bytes more than it has; its size field has two bytes from 256 on.
    let mut lying = zstd(&whole);
    assert_eq!(lying[4] >> 6, 1, "the size field has two bytes");
    lying[6] = lying[6].wrapping_add(1);
    refused! { count:
        "zstd data cannot be decompressed" => write(lying);
        "it is empty" => write(Vec::new());
        "neither a tar nor zstd nor gzip" => write(vec![b'x'; 5000]);
        "a tar without checkpoint/" => write(Tar::default().file("etc/passwd", b"x").end());
        "no config.dump" => write(Tar::default().file("checkpoint/inventory.img", INVENTORY).end());
        "config.dump: not valid JSON" => write({
            Tar::default()
                .file("config.dump", b"{")
                .file("checkpoint/inventory.img", INVENTORY)
                .end()
        });
    }
    assert_eq!((count.0, count.1), (20, 20));
}

#[test]
fn bombs() {
    let mut count = Count::default();
    let limits = Limits {
        ratio_slack_bytes: 1 << 20,
        ratio: 100,
        ..Limits::default()
    };
    let bomb = Tar::good()
        .file("checkpoint/pages-1.img", &vec![0; 32 << 20])
        .end();
    for bytes in [
        zstd(&bomb),
        zstd::encode_all(&bomb[..], 1).unwrap(),
        gzip(&bomb),
    ] {
        count.run("a decompression bomb", &limits, false, write(bytes));
    }
    let limits = Limits {
        entries: 50,
        ..Limits::default()
    };
    let many = (0..100)
        .fold(Tar::good(), |tar, n| tar.file(&format!("volumes/{n}"), b""))
        .end();
    count.run("more than 50 entries", &limits, false, write(many));
    let limits = Limits {
        total_bytes: 1 << 20,
        ..Limits::default()
    };
    count.run(
        "more than 1048576 bytes of content",
        &limits,
        false,
        write(bomb),
    );
    let limits = Limits {
        small_file_bytes: 1000,
        ..Limits::default()
    };
    let large = Tar::default()
        .file("config.dump", &vec![b' '; 2000])
        .file("checkpoint/inventory.img", INVENTORY);
    count.run(
        "config.dump: 2000 bytes, at most 1000",
        &limits,
        false,
        write(large.end()),
    );
    assert_eq!((count.0, count.1), (6, 6));
}
