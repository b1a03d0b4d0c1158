// Moves blocks between files and memory; one implementation per kernel interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "aio.h"

namespace infinity::aio {

// One block, or what is left of it, on its way.
struct Transfer {
    int fd;
    bool write;
    int64_t offset;
    char *address;
    int64_t length;
    uint64_t index;   // of the block, in order of submission
    uint32_t attempt; // how often this block was started before
};

struct Completion {
    uint32_t slot;
    int64_t result; // bytes moved, or -errno
};

// Used by one thread, except for `wake`. A slot, below `capacity`, is busy from `start` until its completion is reaped.
class Transport {
public:
    virtual ~Transport() = default;

    // How many transfers it is worth having started at once.
    virtual uint32_t capacity() const = 0;

    // Says what transfers are going to use, before the first of them; whether that helps. It is pinned at first use.
    virtual bool register_memory(const infinity_aio_region *, size_t) { return false; }

    // Queues a transfer. Nothing need happen before `reap`, which hands over all that was queued at once.
    virtual void start(uint32_t slot, const Transfer &transfer) = 0;

    // Collects up to `room` completions; when `block`, returns only with one or more, or after `wake`.
    virtual size_t reap(Completion *out, size_t room, bool block) = 0;

    // Ends a blocking `reap`, now or the next one. From any thread.
    virtual void wake() = 0;
};

// Each sets `transport` and returns 0, or returns -errno: what the machine refused.
int64_t open_uring(uint32_t depth, std::unique_ptr<Transport> &transport);
int64_t open_kernel_aio(uint32_t depth, std::unique_ptr<Transport> &transport);
int64_t open_threads(uint32_t depth, uint32_t threads, std::unique_ptr<Transport> &transport);

// Injects faults between a transport and its user.
std::unique_ptr<Transport> make_faulty(std::unique_ptr<Transport> inner, const infinity_aio_faults &faults);

int64_t page_size();

} // namespace infinity::aio
