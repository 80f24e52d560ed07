// launches.cu SECONDS: launches an empty kernel over and over, and prints launches a second, as `# rate launches NUMBER`.
#include <chrono>
#include <cstdio>
#include <cstdlib>

__global__ void empty() {}

int main(int argc, char **argv) {
    using clock = std::chrono::steady_clock;
    const double seconds = argc > 1 ? atof(argv[1]) : 5;
    for (int i = 0; i < 10000; i++) empty<<<1, 1>>>();
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
    const auto start = clock::now();
    long count = 0;
    double passed = 0;
    while (passed < seconds) {
        for (int i = 0; i < 1000; i++) empty<<<1, 1>>>();
        count += 1000;
        passed = std::chrono::duration<double>(clock::now() - start).count();
    }
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
    passed = std::chrono::duration<double>(clock::now() - start).count();
    printf("# rate launches %.1f\n", count / passed);
    return 0;
}
