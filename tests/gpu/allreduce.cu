// allreduce.cu LIBNCCL RANKS: all_reduce of 8 bytes and 1 MiB over and over, a process and a GPU for each rank. Prints
// `# rate WHAT NUMBER`: calls a second, the best of many rounds. NCCL is found with dlopen and dlsym, as vLLM does it.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

struct Id {
    char bytes[128];
};
using Comm = void *;

static void check(const char *what, int code) {
    if (code == 0) return;
    fprintf(stderr, "%s: error %d\n", what, code);
    exit(1);
}

template <typename Function> static Function find(void *library, const char *name) {
    void *symbol = dlsym(library, name);
    if (!symbol) check(name, -1);
    return reinterpret_cast<Function>(symbol);
}

static int work(const char *path, int rank, int ranks, std::vector<int> &ends) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) check(dlerror(), -1);
    auto unique = find<int (*)(Id *)>(library, "ncclGetUniqueId");
    auto init = find<int (*)(Comm *, int, Id, int)>(library, "ncclCommInitRank");
    auto reduce = find<int (*)(const void *, void *, size_t, int, int, Comm, cudaStream_t)>(library, "ncclAllReduce");
    auto destroy = find<int (*)(Comm)>(library, "ncclCommDestroy");
    Id id;
    if (rank == 0) {
        check("ncclGetUniqueId", unique(&id));
        for (int other = 1; other < ranks; other++) check("write", write(ends[2 * other + 1], &id, sizeof id) != sizeof id);
    } else {
        check("read", read(ends[2 * rank], &id, sizeof id) != sizeof id);
    }
    check("cudaSetDevice", cudaSetDevice(rank));
    Comm comm;
    check("ncclCommInitRank", init(&comm, ranks, id, rank));
    cudaStream_t stream;
    check("cudaStreamCreate", cudaStreamCreate(&stream));
    const size_t most = 1 << 20;
    float *x;
    check("cudaMalloc", cudaMalloc(&x, most));
    check("cudaMemset", cudaMemset(x, 0, most));
    const struct {
        const char *what;
        size_t bytes;
        int calls;
    } sizes[] = {{"8B", 8, 5000}, {"1MiB", most, 3000}};
    for (auto &size : sizes) {
        double best = 1e9;
        for (int round = 0; round < 20; round++) {
            check("cudaStreamSynchronize", cudaStreamSynchronize(stream));
            auto start = std::chrono::steady_clock::now();
            for (int i = 0; i < size.calls; i++) check("ncclAllReduce", reduce(x, x, size.bytes / 4, 7 /* float */, 0 /* sum */, comm, stream));
            check("cudaStreamSynchronize", cudaStreamSynchronize(stream));
            best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
        if (rank == 0) printf("# rate %s %.1f\n", size.what, size.calls / best);
    }
    check("ncclCommDestroy", destroy(comm));
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 3) check("allreduce LIBNCCL RANKS", 2);
    const int ranks = atoi(argv[2]);
    std::vector<int> ends(2 * ranks);
    for (int rank = 0; rank < ranks; rank++) check("pipe", pipe(&ends[2 * rank]));
    for (int rank = 0; rank < ranks; rank++) {
        pid_t child = fork();
        check("fork", child < 0);
        if (child == 0) {
            int code = work(argv[1], rank, ranks, ends);
            fflush(stdout);
            _exit(code);
        }
    }
    int status, failed = 0;
    for (int rank = 0; rank < ranks; rank++) failed |= wait(&status) < 0 || status != 0;
    return failed;
}
