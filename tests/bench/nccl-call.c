/* nccl-call.c: what the preload library adds to a call of NCCL. Built twice: with -DSTUB a libnccl.so.2 that does
 * nothing, and without a program that calls ncclAllReduce and prints how many nanoseconds each call takes. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct { char internal[128]; } ncclUniqueId;
int ncclGetVersion(int *version);
int ncclGetUniqueId(ncclUniqueId *id);
int ncclCommInitRank(void **comm, int ranks, ncclUniqueId id, int rank);
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream);

#ifdef STUB
static int there;
int ncclGetVersion(int *version) { *version = 22809; return 0; }
int ncclGetUniqueId(ncclUniqueId *id) { *id = (ncclUniqueId){{1}}; return 0; }
int ncclCommInitRank(void **comm, int ranks, ncclUniqueId id, int rank) { *comm = &there; return 0; }
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
    return comm != &there;
}
#else
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

int main(int arguments, char **argument) {
    long calls = arguments > 1 ? atol(argument[1]) : 10000000;
    ncclUniqueId id;
    void *comm;
    if (ncclGetUniqueId(&id) || ncclCommInitRank(&comm, 1, id, 0)) return 1;
    double from = now();
    for (long n = 0; n < calls; n++)
        if (ncclAllReduce(NULL, NULL, 1, 7, 0, comm, NULL)) return 2;
    printf("%.1f\n", (now() - from) / calls);
    return 0;
}
#endif
