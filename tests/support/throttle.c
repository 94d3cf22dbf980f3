/* A slow disk for benchmarks: whatever is read from or written to files below $THROTTLE_DIR takes as long as
   $THROTTLE_BYTES_PER_SECOND allows, for all processes together (they share the state in $THROTTLE_STATE).

   cc -shared -fPIC -O2 -o throttle.so throttle.c -ldl; LD_PRELOAD=throttle.so */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char *folder;
static double bytes_per_second;
static _Atomic long long *free_at; /* when the storage has done what it was asked for, in ns of the monotonic clock */

__attribute__((constructor)) static void begin(void) {
    const char *rate = getenv("THROTTLE_BYTES_PER_SECOND"), *state = getenv("THROTTLE_STATE");
    if (!rate || !state || !getenv("THROTTLE_DIR")) return;
    int fd = open(state, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(long long))) return;
    void *map = mmap(NULL, sizeof(long long), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED) return;
    free_at = map;
    bytes_per_second = atof(rate);
    folder = getenv("THROTTLE_DIR");
}

static int slow(int fd) {
    char link[64], path[4096];
    if (!folder) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return strncmp(path, folder, strlen(folder)) == 0;
}

static void take(int fd, ssize_t bytes) {
    if (bytes <= 0 || !slow(fd)) return;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    long long at = now.tv_sec * 1000000000LL + now.tv_nsec, was = atomic_load(free_at), until;
    do until = (was > at ? was : at) + (long long)(bytes / bytes_per_second * 1e9);
    while (!atomic_compare_exchange_weak(free_at, &was, until));
    struct timespec wake = {until / 1000000000LL, until % 1000000000LL};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &wake, NULL)) {}
}

#define WRAP(name, types, args)                                              \
    ssize_t name types {                                                     \
        static ssize_t(*next) types;                                         \
        if (!next) next = (ssize_t(*) types)dlsym(RTLD_NEXT, #name);         \
        ssize_t done = next args;                                            \
        take(fd, done);                                                      \
        return done;                                                         \
    }

WRAP(read, (int fd, void *p, size_t n), (fd, p, n))
WRAP(write, (int fd, const void *p, size_t n), (fd, p, n))
WRAP(pread64, (int fd, void *p, size_t n, off64_t at), (fd, p, n, at))
WRAP(pwrite64, (int fd, const void *p, size_t n, off64_t at), (fd, p, n, at))
WRAP(readv, (int fd, const struct iovec *v, int n), (fd, v, n))
WRAP(writev, (int fd, const struct iovec *v, int n), (fd, v, n))
WRAP(preadv64, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at))
WRAP(pwritev64, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at))
WRAP(preadv64v2, (int fd, const struct iovec *v, int n, off64_t at, int flags), (fd, v, n, at, flags))
