use super::*;
use sha2::{Digest as _, Sha256};

fn content(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251 + seed) as u8).collect()
}

fn expected(data: &[u8]) -> Digest {
    Digest::from_hash(Sha256::new_with_prefix(data))
}

#[test]
fn one_stream_of_every_length_in_pieces_of_every_length() {
    let data = content(300, 0);
    for len in 0..data.len() {
        for piece in [1, 7, 55, 63, 64, 65, 128, 300] {
            let mut sha = Sha::new();
            data[..len].chunks(piece).for_each(|p| sha.update(p));
            assert_eq!(sha.finish(), expected(&data[..len]), "{len} {piece}");
        }
    }
}

#[test]
fn two_streams_of_different_lengths_that_have_begun() {
    let (one, other) = (content(1000, 1), content(1000, 2));
    for begun in [(0, 0), (1, 0), (63, 64), (65, 10), (200, 130)] {
        for len in [0, 1, 63, 64, 65, 127, 128, 500, 700] {
            for other_len in [0, 1, 64, 65, 129, 640, 800] {
                let (mut a, mut b) = (Sha::new(), Sha::new());
                a.update(&one[..begun.0]);
                b.update(&other[..begun.1]);
                let (to_a, to_b) = (begun.0 + len, begun.1 + other_len);
                update_two(&mut a, &one[begun.0..to_a], &mut b, &other[begun.1..to_b]);
                a.update(&one[to_a..]);
                b.update(&other[to_b..]);
                assert_eq!(a.finish(), expected(&one), "{begun:?} {len} {other_len}");
                assert_eq!(b.finish(), expected(&other), "{begun:?} {len} {other_len}");
            }
        }
    }
}

#[test]
fn many_streams_at_once() {
    for threads in [1, 2, 3] {
        std::thread::scope(|scope| {
            let hashers = Hashers::new(scope, threads);
            let done: Vec<_> = (0..7)
                .map(|n| {
                    let stream = hashers.stream();
                    scope.spawn(move || {
                        let mut all = Vec::new();
                        for piece in 0..40 {
                            let data = content((n * 7919 + piece * 104_729) % 300_000, n);
                            all.extend_from_slice(&data);
                            match piece % 5 {
                                4 => stream.update(&data),
                                _ => stream.feed(Arc::new(data)),
                            }
                        }
                        (stream.finish(), expected(&all))
                    })
                })
                .collect();
            for done in done {
                let (found, expected) = done.join().unwrap();
                assert_eq!(found, expected);
            }
            let empty = hashers.stream().finish();
            assert_eq!(empty, expected(b""));
        });
    }
}

#[test]
fn a_stream_that_is_dropped_is_no_one_s_loss() {
    std::thread::scope(|scope| {
        let hashers = Hashers::new(scope, 1);
        let stream = hashers.stream();
        (0..20).for_each(|n| stream.feed(Arc::new(content(100_000, n))));
        drop(stream);
        let other = hashers.stream();
        other.feed(Arc::new(content(1000, 3)));
        assert_eq!(other.finish(), expected(&content(1000, 3)));
    });
}
