// pointers ROUNDS: calls of CUDA's that a library in front of the driver can get wrong, over and over, and in a thread questions
// about an address all the time. Prints ROUND RESULTS ok|CORRUPT SECONDS; what failed is on stderr. The results are the same with
// and without the preload library, whose only difference here is that CUDA IPC fails.
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <sys/wait.h>
#include <thread>
#include <time.h>
#include <unistd.h>

static const size_t BYTES = 8 << 20;

__global__ void fill(uint64_t *p, size_t n, uint64_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = (seed + i) * 0x9E3779B97F4A7C15ull;
}

static std::atomic<bool> over{false};
static std::atomic<long> wrong{0}, questions{0};

static bool ok(const char *what, cudaError_t error) {
    if (error == cudaSuccess) return true;
    cudaGetLastError();
    fprintf(stderr, "error: %s: %s\n", what, cudaGetErrorString(error));
    return false;
}

#define DO(call) ok(#call, (call))

// Without a device of its own a thread gets no pointer from the question.
static void ask(void *p) {
    DO(cudaSetDevice(0));
    while (!over) {
        cudaPointerAttributes found;
        if (!DO(cudaPointerGetAttributes(&found, p)) || found.type != cudaMemoryTypeDevice || found.devicePointer != p) wrong++;
        questions++;
    }
}

// Another thread's free is no matter of a capture that is this thread's alone.
static bool free_beside_a_capture(cudaStream_t stream, uint64_t *p) {
    void *others;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t made = nullptr;
    if (!DO(cudaMalloc(&others, BYTES)) || !DO(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal))) return false;
    fill<<<64, 256, 0, stream>>>(p, BYTES / 8, 7);
    bool freed = false;
    std::thread([&] { freed = DO(cudaFree(others)); }).join();
    bool fine = DO(cudaStreamEndCapture(stream, &graph)) && DO(cudaGraphInstantiate(&made, graph, 0)) && DO(cudaGraphLaunch(made, stream)) &&
                DO(cudaStreamSynchronize(stream));
    if (made) cudaGraphExecDestroy(made);
    if (graph) cudaGraphDestroy(graph);
    return fine && freed;
}

// This thread's own is forbidden, and ends the capture: with the driver's errors.
static bool free_in_a_capture(cudaStream_t stream, cudaError_t errors[2]) {
    void *p;
    cudaGraph_t graph = nullptr;
    if (!DO(cudaMalloc(&p, BYTES)) || !DO(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal))) return false;
    errors[0] = cudaFree(p);
    errors[1] = cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    if (graph) cudaGraphDestroy(graph);
    return errors[0] == cudaSuccess || DO(cudaFree(p));
}

static bool free_in_a_stream(cudaStream_t stream) {
    uint64_t *p;
    if (!DO(cudaMalloc(&p, BYTES))) return false;
    fill<<<64, 256, 0, stream>>>(p, BYTES / 8, 1);
    return DO(cudaFreeAsync(p, stream)) && DO(cudaStreamSynchronize(stream));
}

static bool range(void *p) {
    using Range = int (*)(unsigned long long *, size_t *, unsigned long long);
    static auto get = reinterpret_cast<Range>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemGetAddressRange_v2"));
    unsigned long long base = 0;
    size_t bytes = 0;
    const int code = get ? get(&base, &bytes, (unsigned long long)p + BYTES / 2 + 1) : -1;
    if (code == 0 && base == (unsigned long long)p && bytes == BYTES) return true;
    fprintf(stderr, "error: cuMemGetAddressRange: %d, %llx of %p, %zu bytes\n", code, base, p, bytes);
    return false;
}

// The child asks once: CUDA refuses it, but must not hang.
static bool child(void *p) {
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(20);
        cudaPointerAttributes found;
        cudaPointerGetAttributes(&found, p);
        _exit(0);
    }
    int status = -1;
    if (pid > 0 && waitpid(pid, &status, 0) == pid && status == 0) return true;
    fprintf(stderr, "error: the child ended with %d\n", status);
    return false;
}

static bool ipc(void *p) {
    const char *preload = getenv("LD_PRELOAD");
    const bool fails = preload && strstr(preload, "cryopod");
    cudaIpcMemHandle_t handle;
    const cudaError_t error = cudaIpcGetMemHandle(&handle, p);
    cudaGetLastError();
    if ((error != cudaSuccess) == fails) return true;
    fprintf(stderr, "error: cudaIpcGetMemHandle: %s\n", cudaGetErrorString(error));
    return false;
}

// Other words than those that were written, after whatever happened meanwhile.
static bool contents(uint64_t *p) {
    static uint64_t words[BYTES / 8];
    if (!DO(cudaMemcpy(words, p, BYTES, cudaMemcpyDeviceToHost))) return false;
    for (size_t i = 0; i < BYTES / 8; i++)
        if (words[i] != (7 + i) * 0x9E3779B97F4A7C15ull) return false;
    return true;
}

int main(int argc, char **argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t *p;
    cudaStream_t stream;
    if (!DO(cudaMalloc(&p, BYTES)) || !DO(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking))) return 1;
    fill<<<64, 256>>>(p, BYTES / 8, 7);
    if (!DO(cudaDeviceSynchronize())) return 1;
    std::thread asks(ask, p);
    bool all = true;
    for (int round = 0; round < rounds; round++) {
        cudaError_t errors[2] = {};
        const bool done[] = {contents(p), free_beside_a_capture(stream, p), free_in_a_capture(stream, errors), free_in_a_stream(stream),
                             range(p),    round % 10 != 0 || child(p),      ipc(p),                        wrong == 0};
        unsigned bits = 0;
        for (size_t i = 0; i < sizeof done; i++) bits |= done[i] << i;
        all = all && bits == 0xff;
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        char line[96];
        const int n = snprintf(line, sizeof line, "%d %02x.%d.%d %s %ld.%03ld\n", round, bits, errors[0], errors[1], bits == 0xff ? "ok" : "CORRUPT", (long)t.tv_sec, t.tv_nsec / 1000000);
        if (write(1, line, n) != n) return 1;
        usleep(50000);
    }
    over = true;
    asks.join();
    fprintf(stderr, "# %ld questions, %ld answered wrong\n", questions.load(), wrong.load());
    return all && wrong == 0 ? 0 : 1;
}
