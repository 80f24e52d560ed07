//! Interleaves the SHA-256 of two streams, with the processor's SHA instructions.
//!
//! Within one stream each of these instructions waits for the previous one (FIPS 180-4, section 6.2.2: every round
//! needs the result of the round before). The other stream's instructions run meanwhile.

use std::arch::x86_64::{
    __m128i, _mm_add_epi32, _mm_alignr_epi8, _mm_blend_epi16, _mm_loadu_si128, _mm_set_epi64x,
    _mm_sha256msg1_epu32, _mm_sha256msg2_epu32, _mm_sha256rnds2_epu32, _mm_shuffle_epi8,
    _mm_shuffle_epi32, _mm_storeu_si128,
};

use super::{BLOCK, State};

/// FIPS 180-4, section 4.2.2.
static K: [u32; 64] = [
    0x428a_2f98,
    0x7137_4491,
    0xb5c0_fbcf,
    0xe9b5_dba5,
    0x3956_c25b,
    0x59f1_11f1,
    0x923f_82a4,
    0xab1c_5ed5,
    0xd807_aa98,
    0x1283_5b01,
    0x2431_85be,
    0x550c_7dc3,
    0x72be_5d74,
    0x80de_b1fe,
    0x9bdc_06a7,
    0xc19b_f174,
    0xe49b_69c1,
    0xefbe_4786,
    0x0fc1_9dc6,
    0x240c_a1cc,
    0x2de9_2c6f,
    0x4a74_84aa,
    0x5cb0_a9dc,
    0x76f9_88da,
    0x983e_5152,
    0xa831_c66d,
    0xb003_27c8,
    0xbf59_7fc7,
    0xc6e0_0bf3,
    0xd5a7_9147,
    0x06ca_6351,
    0x1429_2967,
    0x27b7_0a85,
    0x2e1b_2138,
    0x4d2c_6dfc,
    0x5338_0d13,
    0x650a_7354,
    0x766a_0abb,
    0x81c2_c92e,
    0x9272_2c85,
    0xa2bf_e8a1,
    0xa81a_664b,
    0xc24b_8b70,
    0xc76c_51a3,
    0xd192_e819,
    0xd699_0624,
    0xf40e_3585,
    0x106a_a070,
    0x19a4_c116,
    0x1e37_6c08,
    0x2748_774c,
    0x34b0_bcb5,
    0x391c_0cb3,
    0x4ed8_aa4a,
    0x5b9c_ca4f,
    0x682e_6ff3,
    0x748f_82ee,
    0x78a5_636f,
    0x84c8_7814,
    0x8cc7_0208,
    0x90be_fffa,
    0xa450_6ceb,
    0xbef9_a3f7,
    0xc671_78f2,
];

/// Hashes as many whole blocks as both streams have. Returns `false`, with nothing done, if this processor lacks the
/// instructions.
pub(super) fn blocks(a: &mut State, b: &mut State, of_a: &[u8], of_b: &[u8]) -> bool {
    let able = is_x86_feature_detected!("sha")
        && is_x86_feature_detected!("ssse3")
        && is_x86_feature_detected!("sse4.1");
    if able {
        // SAFETY: the processor has the features that the function was compiled for.
        unsafe { run([a, b], of_a, of_b) };
    }
    able
}

/// # Safety
/// The processor must have these instructions.
#[target_feature(enable = "sha,sse2,ssse3,sse4.1")]
unsafe fn run(states: [&mut State; 2], of_a: &[u8], of_b: &[u8]) {
    // SAFETY: all loads and stores are of arrays, and of blocks whose length comes from their types or from
    // `chunks_exact`; none has to be aligned.
    unsafe {
        let load = |state: &State| -> (__m128i, __m128i) {
            let dcba = _mm_loadu_si128(state.as_ptr().cast());
            let hgfe = _mm_loadu_si128(state.as_ptr().add(4).cast());
            let cdab = _mm_shuffle_epi32(dcba, 0xb1);
            let efgh = _mm_shuffle_epi32(hgfe, 0x1b);
            (
                _mm_alignr_epi8(cdab, efgh, 8),
                _mm_blend_epi16(efgh, cdab, 0xf0),
            )
        };
        let big_endian = _mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203);
        let [first, second] = states;
        let ((abef_a, cdgh_a), (abef_b, cdgh_b)) = (load(first), load(second));
        let (mut abef, mut cdgh) = ([abef_a, abef_b], [cdgh_a, cdgh_b]);
        for (block_a, block_b) in of_a.chunks_exact(BLOCK).zip(of_b.chunks_exact(BLOCK)) {
            let before = (abef, cdgh);
            let word = |block: &[u8], n: usize| {
                let word = _mm_loadu_si128(block.as_ptr().add(16 * n).cast());
                _mm_shuffle_epi8(word, big_endian)
            };
            let words = |block: &[u8]| [0, 1, 2, 3].map(|n| word(block, n));
            let mut w = [words(block_a), words(block_b)];
            // Four rounds of both streams. Also computes the words for the rounds sixteen later.
            macro_rules! rounds {
                ($($n:literal)*) => { $(
                    let k = _mm_loadu_si128(K.as_ptr().add(4 * $n).cast());
                    let kw = [_mm_add_epi32(w[0][$n % 4], k), _mm_add_epi32(w[1][$n % 4], k)];
                    for s in 0..2 {
                        cdgh[s] = _mm_sha256rnds2_epu32(cdgh[s], abef[s], kw[s]);
                    }
                    for s in 0..2 {
                        abef[s] = _mm_sha256rnds2_epu32(abef[s], cdgh[s], _mm_shuffle_epi32(kw[s], 0x0e));
                    }
                    if $n < 12 {
                        for w in &mut w {
                            let (w0, w1, w2, w3) = (w[$n % 4], w[($n + 1) % 4], w[($n + 2) % 4], w[($n + 3) % 4]);
                            let sum = _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4));
                            w[$n % 4] = _mm_sha256msg2_epu32(sum, w3);
                        }
                    }
                )* };
            }
            rounds!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
            for s in 0..2 {
                abef[s] = _mm_add_epi32(abef[s], before.0[s]);
                cdgh[s] = _mm_add_epi32(cdgh[s], before.1[s]);
            }
        }
        for (state, (abef, cdgh)) in [first, second].into_iter().zip(abef.into_iter().zip(cdgh)) {
            let feba = _mm_shuffle_epi32(abef, 0x1b);
            let dchg = _mm_shuffle_epi32(cdgh, 0xb1);
            let dcba = _mm_blend_epi16(feba, dchg, 0xf0);
            let hgef = _mm_alignr_epi8(dchg, feba, 8);
            _mm_storeu_si128(state.as_mut_ptr().cast(), dcba);
            _mm_storeu_si128(state.as_mut_ptr().add(4).cast(), hgef);
        }
    }
}
