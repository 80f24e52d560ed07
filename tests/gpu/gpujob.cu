// gpujob GIB CHUNK_MIB GPU[,GPU...] [zero|half]: one process a GPU, each holding GIB of device memory (plain cudaMalloc)
// filled with random words, zeros, or every other MiB random. Prints TICK SUM ok|CORRUPT SECONDS
// every 10 ms, every second where there are more than 16 processes, and pI behind it when there are several. A GPU may be named often.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                       \
    do {                                                                  \
        cudaError_t e = (call);                                           \
        if (e != cudaSuccess) {                                           \
            fprintf(stderr, "error: %s: %s\n", #call, cudaGetErrorString(e)); \
            exit(1);                                                      \
        }                                                                 \
    } while (0)

__global__ void fill(uint64_t *p, size_t n, uint64_t seed) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += step) {
        uint64_t z = (seed + i) * 0x9E3779B97F4A7C15ull; // splitmix64: does not compress
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        p[i] = z ^ (z >> 31);
    }
}

__global__ void sum(const uint64_t *p, size_t n, unsigned long long *out) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    unsigned long long s = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += step) s += p[i] * (i | 1);
    atomicAdd(out, s);
}

static bool zero = false, half = false;
static useconds_t pause_us = 10000;

static void work(size_t bytes, size_t chunk, int gpu, const char *suffix) {
    CHECK(cudaSetDevice(gpu));
    std::vector<uint64_t *> chunks;
    for (size_t done = 0; done < bytes; done += chunk) {
        uint64_t *p;
        CHECK(cudaMalloc(&p, chunk));
        if (zero) CHECK(cudaMemset(p, 0, chunk));
        else fill<<<1024, 256>>>(p, chunk / 8, done + ((uint64_t)gpu << 48));
        if (half) CHECK(cudaMemset2D((char *)p + (1 << 20), 2 << 20, 0, 1 << 20, chunk >> 21));
        chunks.push_back(p);
    }
    unsigned long long *out, first = 0;
    CHECK(cudaMalloc(&out, 8));
    for (int tick = 0;; tick++) {
        CHECK(cudaMemset(out, 0, 8));
        for (uint64_t *p : chunks) sum<<<1024, 256>>>(p, chunk / 8, out);
        unsigned long long now;
        CHECK(cudaMemcpy(&now, out, 8, cudaMemcpyDeviceToHost));
        if (tick == 0) first = now;
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        char line[128];
        int n = snprintf(line, sizeof line, "%d %016llx %s %ld.%03ld%s\n", tick, now, now == first ? "ok" : "CORRUPT",
                         (long)t.tv_sec, t.tv_nsec / 1000000, suffix);
        if (write(1, line, n) != n) exit(1);
        usleep(pause_us);
    }
}

int main(int argc, char **argv) {
    zero = argc == 5 && !strcmp(argv[4], "zero");
    half = argc == 5 && !strcmp(argv[4], "half");
    if (argc != 4 + (zero || half)) {
        fprintf(stderr, "usage: gpujob GIB CHUNK_MIB GPU[,GPU...] [zero|half]\n");
        return 2;
    }
    size_t bytes = (size_t)(atof(argv[1]) * (1ull << 30)), chunk = (size_t)atol(argv[2]) << 20;
    std::vector<int> gpus;
    for (char *word = strtok(argv[3], ","); word; word = strtok(nullptr, ",")) gpus.push_back(atoi(word));
    if (gpus.size() > 16) pause_us = 1000000;
    if (gpus.size() == 1) work(bytes, chunk, gpus[0], "");
    for (size_t i = 0; i < gpus.size(); i++) { // forked before CUDA is used: none of it survives a fork
        if (fork() == 0) {
            char suffix[16];
            snprintf(suffix, sizeof suffix, " p%zu", i);
            work(bytes, chunk, gpus[i], suffix);
        }
    }
    int status;
    wait(&status); // the first that ends ends all
    return 1;
}
