// One transfer as the caller sees it: many blocks, one completion.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "aio.h"

struct infinity_aio_request {
public:
    explicit infinity_aio_request(const infinity_aio_transfer &transfer) : transfer(transfer) {}

    int64_t finished() const { return finished_; }
    bool done() const { return done_.load(std::memory_order_acquire); }
    int64_t wait(int64_t timeout_milliseconds, infinity_aio_failure *failure);
    void complete(); // by the engine, once, when no block is on its way any more
    void release();  // by the engine and by the caller; the second frees it

    const infinity_aio_transfer transfer;

    // Used by whoever holds the request: first `submit`, then the engine's thread.
    infinity_aio_request *next = nullptr; // in a queue
    uint64_t first_index = 0;             // of its blocks, in order of submission
    int64_t handed_out = 0;               // bytes that are in blocks
    uint32_t blocks_started = 0, blocks_in_flight = 0;
    infinity_aio_failure failure{0, 0, 0};

private:
    ~infinity_aio_request() = default;

    std::atomic<int> owners_{2};
    int64_t finished_ = 0; // published by done_
    std::atomic<bool> done_{false};
    std::mutex mutex_;
    std::condition_variable completed_;
};
