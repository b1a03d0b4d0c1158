// Splits requests into blocks and keeps a transport busy with them, fairly between devices and directions.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "request.h"
#include "transport.h"

// One thread does all the work. A caller's `submit` only appends to a list; the thread takes the whole list at once.
struct infinity_aio_engine {
public:
    infinity_aio_engine(std::unique_ptr<infinity::aio::Transport> transport, int64_t block_size);
    ~infinity_aio_engine(); // finishes all that was submitted
    bool register_memory(const infinity_aio_region *regions, size_t count) {
        return transport_->register_memory(regions, count);
    }
    void submit(infinity_aio_request *request);

private:
    using Request = infinity_aio_request;

    struct Queue {
        Request *first = nullptr, *last = nullptr;
        void append(Request *request);
        void drop_first();
    };
    // What goes to one device in one direction. Each gets an equal share of the blocks in flight: neither reads nor
    // writes starve, and a slow disk cannot fill the queue and leave the others idle.
    struct Lane {
        uint64_t device;
        int64_t direction;
        Queue waiting;
        uint32_t in_flight = 0;
    };
    struct Block {
        Request *request;
        uint32_t lane;
        uint32_t retries;
        int64_t offset, length; // as first started; `transfer` is what is left of it
        infinity::aio::Transfer transfer;
    };

    enum class Next { FILL, REAP, END };

    void run();
    Next take_submitted();
    Lane &lane_of(const Request &request);
    Lane &next_lane();
    void fill();
    void start_block(Lane &lane);
    void finish(infinity::aio::Completion completion);
    void end_block(uint32_t slot, int64_t error);

    const std::unique_ptr<infinity::aio::Transport> transport_;
    const int64_t block_size_;

    std::mutex mutex_;
    Queue submitted_;          // under the mutex, like the next three
    uint64_t next_index_ = 0;
    bool asleep_ = false;      // the thread must be woken for new work
    bool stopping_ = false;

    std::vector<Lane> lanes_; // this and what follows: the thread's own
    size_t turn_ = 0;
    std::vector<Block> blocks_;
    std::vector<uint32_t> free_;
    size_t waiting_ = 0; // requests with blocks not started yet

    std::thread thread_;
};
