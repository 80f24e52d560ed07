// BLAKE3 of memory where it is. `make -C gpu-hooks/cuda/src/copy/digest` makes blake3.ptx of it with nvcc, for GPUs from compute
// capability 7.0 on; tests compare the digests with the blake3 crate's (docs/testbed.md).
//
// A range is cut into blocks of 1 MiB: whole subtrees of BLAKE3's tree. `blake3_blocks` hashes each block, with the leaves of 1 KiB
// spread over its threads; `blake3_parents` makes one digest of the blocks of each range that has several.
#include <cstdint>

struct Block {
    uint64_t address;
    uint32_t bytes;
    // The number of its first leaf within the range.
    uint32_t first_leaf;
    // It is the whole range.
    uint32_t is_root;
    uint32_t unused;
};

struct Range {
    // Of its blocks, among all.
    uint32_t first, count;
};

static const int LEAF = 1024, LEAVES = 1024, THREADS = 256;
enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

__constant__ uint32_t IV[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

__device__ __forceinline__ uint32_t rotated(uint32_t x, int by) { return __funnelshift_r(x, x, by); }

#define G(a, b, c, d, x, y)                                                                                                            \
    v[a] += v[b] + (x); v[d] = rotated(v[d] ^ v[a], 16); v[c] += v[d]; v[b] = rotated(v[b] ^ v[c], 12);                                \
    v[a] += v[b] + (y); v[d] = rotated(v[d] ^ v[a], 8); v[c] += v[d]; v[b] = rotated(v[b] ^ v[c], 7);
#define ROUND(a, b, c, d, e, f, g, h, i, j, k, l, x, n, o, p)                                                                          \
    G(0, 4, 8, 12, m[a], m[b]) G(1, 5, 9, 13, m[c], m[d]) G(2, 6, 10, 14, m[e], m[f]) G(3, 7, 11, 15, m[g], m[h])                      \
    G(0, 5, 10, 15, m[i], m[j]) G(1, 6, 11, 12, m[k], m[l]) G(2, 7, 8, 13, m[x], m[n]) G(3, 4, 9, 14, m[o], m[p])

__device__ __forceinline__ void compress(uint32_t cv[8], const uint32_t m[16], uint64_t counter, uint32_t len, uint32_t flags) {
    uint32_t v[16];
    for (int i = 0; i < 8; i++) v[i] = cv[i];
    for (int i = 0; i < 4; i++) v[8 + i] = IV[i];
    v[12] = (uint32_t)counter; v[13] = (uint32_t)(counter >> 32); v[14] = len; v[15] = flags;
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ROUND(2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
    ROUND(3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1)
    ROUND(10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6)
    ROUND(12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4)
    ROUND(9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7)
    ROUND(11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13)
    for (int i = 0; i < 8; i++) cv[i] = v[i] ^ v[i + 8];
}

// One leaf of at most 1 KiB. Memory is allocated in larger units than 4 bytes, so the word that ends it can be read.
__device__ __forceinline__ void hash_leaf(uint32_t cv[8], const uint8_t *from, uint32_t bytes, uint64_t number, uint32_t flags) {
    for (int i = 0; i < 8; i++) cv[i] = IV[i];
    uint32_t parts = bytes == 0 ? 1 : (bytes + 63) / 64;
#pragma unroll 1
    for (uint32_t part = 0; part < parts; part++) {
        uint32_t m[16], len = min(64u, bytes - part * 64), first = part == 0 ? CHUNK_START : 0, last = part + 1 == parts ? CHUNK_END | flags : 0;
        const uint8_t *at = from + part * 64;
        if (len == 64) {
            const uint4 *q = (const uint4 *)at;
            for (int i = 0; i < 4; i++) { uint4 w = q[i]; m[4 * i] = w.x; m[4 * i + 1] = w.y; m[4 * i + 2] = w.z; m[4 * i + 3] = w.w; }
        } else {
            for (int i = 0; i < 16; i++) m[i] = 0;
            for (uint32_t i = 0; i < len; i++) m[i / 4] |= (uint32_t)at[i] << (8 * (i % 4));
        }
        compress(cv, m, number, len, first | last);
    }
}

__device__ __noinline__ void hash_parent(uint32_t out[8], const uint32_t *left, const uint32_t *right, uint32_t flags) {
    uint32_t m[16];
    for (int i = 0; i < 8; i++) { m[i] = left[i]; m[8 + i] = right[i]; out[i] = IV[i]; }
    compress(out, m, 0, 64, PARENT | flags);
}

extern "C" __global__ void __launch_bounds__(THREADS) blake3_blocks(const Block *blocks, uint32_t *out) {
    __shared__ uint32_t nodes[LEAVES][9];
    const Block block = blocks[blockIdx.x];
    const uint8_t *from = (const uint8_t *)block.address;
    uint32_t count = block.bytes == 0 ? 1 : (block.bytes + LEAF - 1) / LEAF, root = block.is_root ? ROOT : 0;
    for (uint32_t leaf = threadIdx.x; leaf < count; leaf += THREADS) {
        uint32_t cv[8];
        hash_leaf(cv, from + leaf * LEAF, min((uint32_t)LEAF, block.bytes - leaf * LEAF), block.first_leaf + leaf, count == 1 ? root : 0);
        for (int i = 0; i < 8; i++) nodes[leaf][i] = cv[i];
    }
    // Neighbours are joined; the last of an odd number waits for the next level.
    while (count > 1) {
        uint32_t pairs = count / 2, next = (count + 1) / 2, cv[2][8], kept[8];
        __syncthreads();
        int done = 0;
        for (uint32_t pair = threadIdx.x; pair < pairs; pair += THREADS) hash_parent(cv[done++], nodes[2 * pair], nodes[2 * pair + 1], next == 1 ? root : 0);
        if (count % 2 && threadIdx.x == 0) for (int i = 0; i < 8; i++) kept[i] = nodes[count - 1][i];
        __syncthreads();
        done = 0;
        for (uint32_t pair = threadIdx.x; pair < pairs; pair += THREADS, done++) for (int i = 0; i < 8; i++) nodes[pair][i] = cv[done][i];
        if (count % 2 && threadIdx.x == 0) for (int i = 0; i < 8; i++) nodes[next - 1][i] = kept[i];
        count = next;
    }
    __syncthreads();
    if (threadIdx.x < 8) out[(size_t)blockIdx.x * 8 + threadIdx.x] = nodes[0][threadIdx.x];
}

// The digest of each range takes the place of its first block's.
extern "C" __global__ void blake3_parents(const Range *ranges, uint32_t *nodes, uint32_t all) {
    uint32_t number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= all) return;
    const Range range = ranges[number];
    uint32_t *own = nodes + (size_t)range.first * 8;
    for (uint32_t count = range.count; count > 1; count = (count + 1) / 2) {
        for (uint32_t pair = 0; pair < count / 2; pair++) {
            uint32_t cv[8];
            hash_parent(cv, own + 16 * pair, own + 16 * pair + 8, count == 2 ? ROOT : 0);
            for (int i = 0; i < 8; i++) own[8 * pair + i] = cv[i];
        }
        if (count % 2) for (int i = 0; i < 8; i++) own[8 * (count / 2) + i] = own[8 * (count - 1) + i];
    }
}
