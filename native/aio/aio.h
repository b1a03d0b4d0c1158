// The C interface of the asynchronous I/O library, the only thing that other languages see.
//
// Every function returns a value >= 0, or -errno. No exception and no C++ type crosses this interface, and there is no
// global state. An engine owns threads: never use one on both sides of a fork.
#pragma once

#include <cstdint>

#define INFINITY_AIO_API extern "C" __attribute__((visibility("default")))

struct infinity_aio_engine;
struct infinity_aio_request;

enum infinity_aio_backend : int64_t {
    INFINITY_AIO_URING = 0,   // io_uring
    INFINITY_AIO_KERNEL = 1,  // Linux kernel AIO (io_submit)
    INFINITY_AIO_THREADS = 2, // pread and pwrite in a pool of threads
};

enum infinity_aio_direction : int64_t { INFINITY_AIO_READ = 0, INFINITY_AIO_WRITE = 1 };

// Faults to inject, for tests. Every draw depends only on the seed, the index of the block in order of submission and how
// often that block was tried, so a run repeats exactly.
struct infinity_aio_faults {
    uint64_t seed;
    double short_probability; // transfer only some whole pages of what is left of the block
    double fail_probability;  // report `error` for a transfer
    int64_t error;            // the errno reported
    double delay_seconds;     // hold each completion back for up to this long
    int64_t reorder;          // not 0: hold completions back and release them in another order
    int64_t fail_at;          // index of the one block that fails, or -1
};

struct infinity_aio_options {
    int64_t backend;
    int64_t queue_depth; // blocks in flight, 1 to 4096
    int64_t block_size;  // bytes, a multiple of the page size, at most 1 GiB
    int64_t threads;     // of the pool, 1 to 256
    const infinity_aio_faults *faults; // or null
};

struct infinity_aio_transfer {
    int64_t direct_fd;        // opened with O_DIRECT, or -1 where that is refused
    int64_t buffered_fd;      // of the same file, for what direct I/O cannot carry
    int64_t memory_alignment; // of direct I/O on this file
    int64_t offset_alignment;
    uint64_t device; // requests to different devices share the queue fairly
    int64_t direction;
    int64_t offset;
    void *address;
    int64_t length;
};

struct infinity_aio_region {
    void *address;
    int64_t length;
};

struct infinity_aio_failure {
    int64_t error;  // errno; ENODATA: the file ended first
    int64_t offset; // of the block that failed, in the file
    int64_t length;
};

// Opens an engine. The error says what this machine refused, for example -EPERM for io_uring under seccomp.
INFINITY_AIO_API int64_t infinity_aio_open(const infinity_aio_options *options, infinity_aio_engine **engine);

// Waits for everything in flight, ends the threads, frees the engine. Requests outlive it until they are released.
INFINITY_AIO_API int64_t infinity_aio_close(infinity_aio_engine *engine);

// Tells the engine which memory requests are going to use, once, before the first of them. Where the kernel can, a
// region is pinned by the first block in it instead of anew by every one, so that what is never used stays untouched;
// where it cannot, or may lock no more memory, nothing changes. Returns the number of regions that may be pinned. They
// must stay mapped until the engine is closed.
INFINITY_AIO_API int64_t infinity_aio_register(infinity_aio_engine *engine, const infinity_aio_region *regions,
                                               int64_t count);

// Queues one transfer, from any thread. The buffer and the descriptors must stay as they are until the request is done.
INFINITY_AIO_API int64_t infinity_aio_submit(infinity_aio_engine *engine, const infinity_aio_transfer *transfer,
                                             infinity_aio_request **request);

// 1 when every block of the request is finished, well or badly, otherwise 0.
INFINITY_AIO_API int64_t infinity_aio_done(infinity_aio_request *request);

// When the last block finished, in nanoseconds of CLOCK_MONOTONIC; only once the request is done.
INFINITY_AIO_API int64_t infinity_aio_finished(infinity_aio_request *request);

// Waits until the request is done, from any number of threads, as often as wanted. Returns 0, or -errno with `failure`
// filled in, or 1 when it is not done in time; a negative timeout waits for as long as it takes.
INFINITY_AIO_API int64_t infinity_aio_wait(infinity_aio_request *request, int64_t timeout_milliseconds,
                                           infinity_aio_failure *failure);

// Gives the request back. One that is still in flight goes on, and frees itself when it is done.
INFINITY_AIO_API int64_t infinity_aio_release(infinity_aio_request *request);

// The alignment that direct I/O on this descriptor needs. -EOPNOTSUPP: the file takes none; -ENOSYS: the kernel cannot say.
INFINITY_AIO_API int64_t infinity_aio_alignment(int64_t fd, int64_t *memory_alignment, int64_t *offset_alignment);
