use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::format::names;

static NEVER: AtomicBool = AtomicBool::new(false);

/// Bytes that do not compress.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

fn options(codec: Codec) -> WriteOptions {
    WriteOptions {
        chunk_bytes: MIN_CHUNK,
        shard_bytes: 1 << 20,
        threads: 3,
        codec,
        sync: false,
        ..WriteOptions::default()
    }
}

fn save(dir: &Path, sources: &[(&str, &[u8])], codec: Codec) -> Written {
    let sources: Vec<MemorySource<'_>> = sources
        .iter()
        .map(|(id, bytes)| MemorySource { id, bytes })
        .collect();
    write(dir, &sources, &options(codec), None, &NEVER).unwrap()
}

fn load(vram: &Vram, region: usize) -> Result<Vec<u8>, VramError> {
    let mut to = vec![7; usize::try_from(vram.index.regions[region].bytes).unwrap()];
    let options = ReadOptions {
        threads: 3,
        ..ReadOptions::default()
    };
    vram.read(region, &mut to, &options, &NEVER)?;
    Ok(to)
}

fn open(dir: &Path) -> Vram {
    Vram::open(dir, None).unwrap().unwrap()
}

#[test]
fn what_is_written_is_read_back() {
    let mut half = noise(3 << 20, 1);
    half[1 << 20..2 << 20].fill(0);
    half.extend_from_slice(b"tail");
    let text: Vec<u8> = b"the same words again and again. ".repeat(100_000);
    for codec in [Codec::Auto, Codec::None, Codec::Lz4, Codec::Zstd] {
        let dir = TempDir::new().unwrap();
        let written = save(
            dir.path(),
            &[("a", &half), ("none", &[]), ("b", &text)],
            codec,
        );
        let vram = Vram::open(dir.path(), Some(written.facts.digest.parse().unwrap()))
            .unwrap()
            .unwrap();
        assert_eq!(vram.facts(), written.facts);
        assert_eq!(load(&vram, 0).unwrap(), half);
        assert_eq!(load(&vram, 1).unwrap(), b"");
        assert_eq!(load(&vram, 2).unwrap(), text);
        vram.verify(2, &NEVER).unwrap();
        let facts = written.facts;
        assert_eq!(facts.zero, 16, "{facts:?}");
        assert_eq!(facts.bytes, (half.len() + text.len()) as u64);
        match codec {
            Codec::None => assert_eq!(facts.raw + facts.same + facts.zero, facts.chunks),
            Codec::Lz4 | Codec::Auto => assert!(facts.lz4 > 0 && facts.raw > 0, "{facts:?}"),
            Codec::Zstd => assert!(facts.zstd > 0 && facts.raw > 0, "{facts:?}"),
        }
    }
}

#[test]
fn a_chunk_is_compressed_if_it_shrinks() {
    let random = noise(1 << 20, 2);
    let text = b"the same words again and again. ".repeat(30_000);
    assert!(!codec::pays(&random));
    assert!(codec::pays(&text));
    assert!(codec::pays(&[0; 1 << 20]));
    // Zeros in front, in the end, and too few of them.
    assert!(codec::pays(&[&[0; 256 << 10], &random[..]].concat()));
    assert!(codec::pays(&[&random[..], &[0; 256 << 10]].concat()));
    assert!(!codec::pays(&[&random[..], &[0; 64 << 10]].concat()));
}

#[test]
fn zeros_and_repetitions_take_no_room() {
    let dir = TempDir::new().unwrap();
    let zeros = vec![0; 8 << 20];
    let facts = save(dir.path(), &[("z", &zeros)], Codec::Auto).facts;
    assert_eq!((facts.stored_bytes, facts.shards, facts.zero), (0, 0, 128));
    assert_eq!(load(&open(dir.path()), 0).unwrap(), zeros);

    let dir = TempDir::new().unwrap();
    let chunk = noise(MIN_CHUNK as usize, 3);
    let same = chunk.repeat(40);
    let facts = save(dir.path(), &[("s", &same)], Codec::Auto).facts;
    assert_eq!(
        (facts.raw, facts.same, facts.stored_bytes),
        (1, 39, u64::from(MIN_CHUNK))
    );
    assert_eq!(load(&open(dir.path()), 0).unwrap(), same);
}

#[test]
fn a_directory_is_written_again() {
    let dir = TempDir::new().unwrap();
    assert!(Vram::open(dir.path(), None).unwrap().is_none());
    save(dir.path(), &[("a", &noise(5 << 20, 4))], Codec::None);
    assert!(dir.path().join(names::vram_shard(2)).exists());
    let small = noise(MIN_CHUNK as usize, 5);
    save(dir.path(), &[("a", &small)], Codec::None);
    assert!(!dir.path().join(names::vram_shard(1)).exists());
    assert_eq!(load(&open(dir.path()), 0).unwrap(), small);
}

#[test]
fn every_damage_is_found() {
    let dir = TempDir::new().unwrap();
    let data = noise(2 << 20, 6);
    let digest = save(dir.path(), &[("a", &data)], Codec::None).facts.digest;
    let shard = dir.path().join(names::vram_shard(0));
    let good = std::fs::read(&shard).unwrap();

    let mut bad = good.clone();
    bad[good.len() / 2] ^= 1;
    std::fs::write(&shard, &bad).unwrap();
    let vram = open(dir.path());
    for error in [
        load(&vram, 0).unwrap_err(),
        vram.verify(2, &NEVER).unwrap_err(),
    ] {
        assert!(
            error.to_string().contains("vram-0000.img: chunk"),
            "{error}"
        );
    }
    let mut unchecked = vec![0; data.len()];
    let options = ReadOptions {
        check: false,
        ..ReadOptions::default()
    };
    vram.read(0, &mut unchecked, &options, &NEVER).unwrap();

    std::fs::write(&shard, &good[1..]).unwrap();
    assert!(Vram::open(dir.path(), None).is_err());
    std::fs::remove_file(&shard).unwrap();
    assert!(Vram::open(dir.path(), None).is_err());
    std::os::unix::fs::symlink("/etc/passwd", &shard).unwrap();
    assert!(Vram::open(dir.path(), None).is_err());
    std::fs::remove_file(&shard).unwrap();
    std::fs::write(&shard, &good).unwrap();
    assert!(Vram::open(dir.path(), Some(ChunkDigest::of(b"another"))).is_err());
    assert!(Vram::open(dir.path(), Some(digest.parse().unwrap())).is_ok());
}

#[test]
fn a_chain_of_parents() {
    let root = TempDir::new().unwrap();
    let dirs: Vec<_> = (0..3).map(|i| root.path().join(format!("{i}"))).collect();
    let mut data = noise(4 << 20, 7);
    for (i, dir) in dirs.iter().enumerate() {
        std::fs::create_dir(dir).unwrap();
        let parent = i.checked_sub(1).map(|j| open(&dirs[j]));
        if i > 0 {
            data[i << 20] ^= 1; // one chunk of 64
        }
        let source = [MemorySource {
            id: "a",
            bytes: &data,
        }];
        let facts = write(dir, &source, &options(Codec::Auto), parent.as_ref(), &NEVER)
            .unwrap()
            .facts;
        assert_eq!(facts.parent, if i > 0 { 63 } else { 0 });
        assert_eq!(facts.raw, if i > 0 { 1 } else { 64 });
        assert_eq!(load(&open(dir), 0).unwrap(), data);
    }
    open(&dirs[2]).verify(2, &NEVER).unwrap();
    assert_eq!(open(&dirs[2]).parents().count(), 2);
    // Complete, without the others.
    let whole = root.path().join("whole");
    std::fs::create_dir(&whole).unwrap();
    let facts = flatten::flatten(&open(&dirs[2]), &whole, &options(Codec::None), &NEVER)
        .unwrap()
        .facts;
    assert_eq!((facts.raw, facts.parent), (64, 0));
    assert_eq!(load(&open(&whole), 0).unwrap(), data);
    // All of them elsewhere, and the first at a third place.
    let moved = TempDir::new().unwrap();
    for dir in &dirs[1..] {
        std::fs::rename(dir, moved.path().join(dir.file_name().unwrap())).unwrap();
    }
    assert_eq!(load(&open(&moved.path().join("2")), 0).unwrap(), data);
    let other = TempDir::new().unwrap();
    std::fs::rename(&dirs[0], other.path().join("x")).unwrap();
    let last = moved.path().join("2");
    let error = Vram::open(&last, None).unwrap_err().to_string();
    assert!(
        error.contains("is missing or another one; put it back"),
        "{error}"
    );
    let found = Vram::open_with(&last, None, &[other.path().to_owned()]).unwrap();
    assert_eq!(load(&found.unwrap(), 0).unwrap(), data);
    std::fs::rename(other.path().join("x"), &dirs[0]).unwrap();
    for dir in &dirs[1..] {
        std::fs::rename(moved.path().join(dir.file_name().unwrap()), dir).unwrap();
    }
    // CRIU's link counts as well.
    std::os::unix::fs::symlink("../1", dirs[2].join(names::PARENT_LINK)).unwrap();
    open(&dirs[2]).verify(2, &NEVER).unwrap();
    // A damaged chunk of a parent.
    let shard = dirs[0].join(names::vram_shard(0));
    let good = std::fs::read(&shard).unwrap();
    let mut bad = good.clone();
    bad[100] ^= 1;
    std::fs::write(&shard, bad).unwrap();
    assert!(flatten::flatten(&open(&dirs[2]), &whole, &options(Codec::None), &NEVER).is_err());
    std::fs::write(&shard, good).unwrap();
    // Another one in the parent's place, and none.
    save(&dirs[0], &[("a", &noise(4 << 20, 8))], Codec::Auto);
    let error = Vram::open(&dirs[2], None).unwrap_err().to_string();
    assert!(
        error.contains("/0: the parent checkpoint") && error.contains("is missing or another one"),
        "{error}"
    );
    std::fs::remove_dir_all(&dirs[0]).unwrap();
    // A table of a stranger learns nothing of other directories.
    assert_eq!(Vram::open(&dirs[2], None).unwrap_err().to_string(), error);
    // A directory that is its own parent.
    std::os::unix::fs::symlink(".", dirs[1].join(names::PARENT_LINK)).unwrap();
    assert!(Vram::open(&dirs[1], None).is_err());
}

/// A child may build upon the second of two equal chunks of its parent.
#[test]
fn a_chunk_that_repeats_another_is_verified_like_it() {
    let dir = TempDir::new().unwrap();
    let once = noise(MIN_CHUNK as usize, 9);
    save(
        dir.path(),
        &[("a", &[&once[..], &once].concat())],
        Codec::Auto,
    );
    let kinds = |vram: &Vram| [vram.index.chunks[0].kind, vram.index.chunks[1].kind];
    let vram = open(dir.path());
    assert_eq!(kinds(&vram), [ChunkKind::Raw, ChunkKind::Same]);
    vram.verify_chunks(&[1], 1, &NEVER).unwrap();
    let shard = dir.path().join(names::vram_shard(0));
    let mut bytes = std::fs::read(&shard).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    assert!(open(dir.path()).verify_chunks(&[1], 1, &NEVER).is_err());
}

#[test]
fn what_fails_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let data = noise(2 << 20, 9);
    let source = [MemorySource {
        id: "a",
        bytes: &data,
    }];
    let called_off = write(
        dir.path(),
        &source,
        &options(Codec::None),
        None,
        &AtomicBool::new(true),
    );
    assert!(matches!(called_off, Err(VramError::Cancelled)));
    let twice = [source[0], source[0]];
    assert!(write(dir.path(), &twice, &options(Codec::None), None, &NEVER).is_err());
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    let missing = dir.path().join("missing");
    let error = write(&missing, &source, &options(Codec::None), None, &NEVER).unwrap_err();
    assert!(
        error.to_string().contains("missing/vram-0000.img"),
        "{error}"
    );
}

/// A table with every kind of chunk.
fn sample() -> VramIndex {
    let digest = ChunkDigest::of(b"x");
    let size = MIN_CHUNK;
    let chunk = |kind, stored, place| Chunk {
        kind,
        shard: 0,
        stored,
        place,
        digest,
    };
    VramIndex {
        chunk_bytes: size,
        regions: vec![
            Region {
                id: "a".into(),
                bytes: u64::from(size) * 4,
            },
            Region {
                id: "b".into(),
                bytes: u64::from(size) * 2,
            },
        ],
        shards: vec![u64::from(size) + 100],
        parent: Some(ChunkDigest::of(b"p")),
        parent_at: vec!["../p".into()],
        chunks: vec![
            Chunk::ZERO,
            chunk(ChunkKind::Raw, size, 100),
            chunk(ChunkKind::Lz4, 60, 0),
            chunk(ChunkKind::Zstd, 40, 60),
            chunk(ChunkKind::Same, 0, 1),
            chunk(ChunkKind::Parent, 0, 9),
        ],
        digest: ChunkDigest::default(),
    }
}

fn parse(bytes: &[u8]) -> Result<VramIndex, VramError> {
    VramIndex::parse(bytes, Path::new("vram-index.img"))
}

#[test]
fn a_table_is_read_back() {
    let mut index = sample();
    let bytes = index.encode().unwrap();
    assert_eq!(parse(&bytes).unwrap(), index);
    let mut later = bytes.clone();
    later[8] = 2;
    assert!(matches!(
        parse(&later),
        Err(VramError::Version { found: 2, .. })
    ));
    for cut in [0, 8, 24, 55, bytes.len() - 1] {
        assert!(parse(&bytes[..cut]).is_err());
    }
}

#[test]
fn hostile_tables_are_refused() {
    let cases: [fn(&mut VramIndex); 19] = [
        |i| i.chunk_bytes = 0,
        |i| i.chunk_bytes = MIN_CHUNK + 1,
        |i| i.chunk_bytes = 1 << 31,
        |i| i.regions[1].id = "a".into(),
        |i| i.regions[0].bytes = u64::MAX,
        |i| i.regions[0].bytes += 1,
        |i| i.regions.clear(),
        |i| i.shards.clear(),
        |i| i.shards[0] -= 1,
        |i| i.parent = None,
        |i| i.chunks[0].place = 1,
        |i| i.chunks[1].place = u64::MAX,
        |i| i.chunks[1].stored = 5,
        |i| i.chunks[2].stored = 0,
        |i| i.chunks[3].stored = MIN_CHUNK,
        |i| i.chunks[4].place = 4, // itself
        |i| i.chunks[4].place = 6,
        |i| i.chunks[4].place = 0, // zeros
        |i| i.chunks[4].digest = ChunkDigest::of(b"y"),
    ];
    for (n, spoil) in cases.iter().enumerate() {
        let mut index = sample();
        spoil(&mut index);
        assert!(index.encode().is_err(), "case {n}");
    }
}

proptest! {
    /// With a matching digest, so that the parser reaches what follows.
    #[test]
    fn a_spoilt_table_is_an_error_or_valid(at: prop::sample::Index, value: u8) {
        let mut index = sample();
        let mut bytes = index.encode().unwrap();
        let end = bytes.len() - 32;
        bytes[at.index(end)] = value;
        let digest = ChunkDigest::of(&bytes[..end]);
        bytes[end..].copy_from_slice(&digest.0);
        if let Ok(mut index) = parse(&bytes) {
            prop_assert!(index.encode().is_ok());
        }
    }

    #[test]
    fn any_memory_is_read_back(
        pieces in proptest::collection::vec((0..4u8, 1..200_000usize), 0..8),
        codec in prop::sample::select(vec![Codec::Auto, Codec::None, Codec::Lz4, Codec::Zstd]),
        cut in 0..8usize,
    ) {
        let mut data = Vec::new();
        for (kind, len) in pieces {
            match kind {
                0 => data.resize(data.len() + len, 0),
                1 => data.extend(noise(len, 1)),
                2 => data.extend(noise(len, len as u64)),
                _ => data.extend(std::iter::repeat_n(b"words ", len / 6).flatten()),
            }
        }
        let (a, b) = data.split_at(data.len() / 8 * cut);
        let dir = TempDir::new().unwrap();
        save(dir.path(), &[("a", a), ("b", b)], codec);
        let vram = open(dir.path());
        prop_assert_eq!(load(&vram, 0).unwrap(), a);
        prop_assert_eq!(load(&vram, 1).unwrap(), b);
        vram.verify(2, &NEVER).unwrap();
    }
}

/// Memory of so many chunks, each one of a few contents; 0 is zeros.
fn memory(chunks: &[u8], tail: usize) -> Vec<u8> {
    let chunk = |kind: &u8| match kind {
        0 => vec![0; MIN_CHUNK as usize],
        kind => noise(MIN_CHUNK as usize, u64::from(*kind)),
    };
    let mut bytes: Vec<u8> = chunks.iter().flat_map(chunk).collect();
    bytes.truncate(bytes.len() - tail.min(bytes.len()));
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Whatever memory looked like when it was taken, and whatever has become of it: in the end it is as it is.
    #[test]
    fn what_was_written_ahead_is_checked(
        before in proptest::collection::vec(proptest::collection::vec(0u8..5, 0..40), 0..3),
        changes in proptest::collection::vec((0usize..3, 0usize..40, 0u8..6), 0..12),
        filled in proptest::collection::vec(0usize..3 << 20, 3),
        tail in 0usize..70_000,
        order in Just(vec![0usize, 1, 2]).prop_shuffle(),
        with_parent: bool,
        settled: bool,
        by_digests: bool,
    ) {
        let dir = TempDir::new().unwrap();
        let parent = with_parent.then(|| {
            let path = dir.path().join("parent");
            std::fs::create_dir(&path).unwrap();
            save(&path, &[("old", &memory(&[1, 2], 0))], Codec::Auto);
            open(&path)
        });
        let images = dir.path().join("images");
        std::fs::create_dir(&images).unwrap();
        let early: Vec<Vec<u8>> = before.iter().map(|chunks| memory(chunks, tail)).collect();
        let mut chunks = before.clone();
        for (m, i, kind) in changes {
            if let Some(chunk) = chunks.get_mut(m).and_then(|all| all.get_mut(i)) {
                *chunk = kind;
            }
        }
        // One that was not there before, and the others in another order.
        chunks.resize(3, vec![1, 0, 3]);
        let late: Vec<Vec<u8>> = chunks.iter().map(|chunks| memory(chunks, tail)).collect();

        let options = options(Codec::Auto);
        let mut writer = Writer::new(&images, &options, parent.as_ref(), &NEVER);
        // Of memory whose digests others have made, what is not needed is not there.
        let (mut given, mut digests) = (late.clone(), Vec::new());
        for (m, bytes) in given.iter_mut().enumerate() {
            let made = OnceLock::new();
            if by_digests && settled && early.get(m) == late.get(m) {
                let whole = bytes.chunks_exact_mut(MIN_CHUNK as usize);
                let all: Vec<ChunkDigest> = whole.map(|chunk| ChunkDigest::of(chunk)).collect();
                let needed = Writer::needed(&options, parent.as_ref(), &all);
                for (chunk, needed) in bytes.chunks_exact_mut(MIN_CHUNK as usize).zip(needed) {
                    if !needed {
                        chunk.fill(0);
                    }
                }
                made.set(all).unwrap();
            }
            digests.push(made);
        }
        let taken: Vec<Ahead<'_>> = (early.iter().zip(&late).zip(&given).zip(&digests))
            .map(|(((bytes, late), given), digests)| {
                let complete = settled && bytes == late;
                let bytes = if complete { given } else { bytes };
                let digests = complete.then_some(digests);
                Ahead { bytes, complete, digests }
            })
            .collect();
        let filled: Vec<AtomicUsize> = filled.into_iter().map(AtomicUsize::new).collect();
        writer.ahead(&taken, &filled[..taken.len()], &AtomicBool::new(true)).unwrap();
        let names = ["a", "b", "c"];
        let sources: Vec<MemorySource<'_>> = order
            .iter()
            .map(|m| MemorySource { id: names[*m], bytes: &given[*m] })
            .collect();
        let ahead: Vec<Option<usize>> =
            order.iter().map(|m| (*m < early.len()).then_some(*m)).collect();
        writer.finish(&sources, &ahead).unwrap();

        let vram = open(&images);
        vram.verify(2, &NEVER).unwrap();
        for (region, m) in order.iter().enumerate() {
            prop_assert!(load(&vram, region).unwrap() == late[*m], "memory {}", m);
        }
    }
}

#[test]
fn a_writer_that_has_not_finished_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let bytes = noise(4 << 20, 5);
    let options = options(Codec::None);
    let mut writer = Writer::new(dir.path(), &options, None, &NEVER);
    let filled = [AtomicUsize::new(bytes.len())];
    let over = AtomicBool::new(true);
    let taken = Ahead {
        bytes: &bytes,
        complete: false,
        digests: None,
    };
    writer.ahead(&[taken], &filled, &over).unwrap();
    assert!(dir.path().join(names::vram_shard(0)).exists());
    drop(writer);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn bytes_that_are_not_what_their_digest_says_are_refused() {
    let dir = TempDir::new().unwrap();
    let options = options(Codec::None);
    let size = MIN_CHUNK as usize;
    let right = noise(size, 5);
    // One that is compared, and one that is missing.
    for (first, second) in [
        (noise(size, 6), right.clone()),
        (right.clone(), vec![0; size]),
    ] {
        let digest = ChunkDigest::of(&right);
        let digests = OnceLock::from(vec![digest, ChunkDigest::of(&noise(size, 7))]);
        let other = [first, second].concat();
        let mut writer = Writer::new(dir.path(), &options, None, &NEVER);
        let taken = Ahead {
            bytes: &other,
            complete: true,
            digests: Some(&digests),
        };
        let filled = [AtomicUsize::new(0)];
        let over = AtomicBool::new(true);
        writer.ahead(&[taken], &filled, &over).unwrap();
        let sources = [MemorySource {
            id: "a",
            bytes: &other,
        }];
        let refused = writer.finish(&sources, &[Some(0)]).unwrap_err();
        assert!(refused.to_string().contains("digest"), "{refused}");
    }
}
