// Splits requests into blocks and keeps a transport busy with them, fairly between devices and directions.
#include "engine.h"

#include <algorithm>
#include <cerrno>

#include <pthread.h>

#include "descriptor.h"

using infinity::aio::Completion;
using infinity::aio::page_size;
using infinity::aio::SignalsBlocked;
using infinity::aio::Transfer;
using infinity::aio::Transport;

namespace {

// How often in a row the kernel may say "again" to one block that does not move.
constexpr uint32_t MAX_RETRIES = 64;

// Direct I/O moves whole pages only, and buffered I/O the rest. As no page is ever shared by the two, a page in the
// page cache cannot be written back over what direct I/O has just written.
int64_t direct_multiple(const infinity_aio_transfer &t) { return std::max(page_size(), t.offset_alignment); }

bool can_be_direct(const infinity_aio_transfer &t, int64_t block_size) {
    return t.direct_fd >= 0 && t.offset % direct_multiple(t) == 0 && block_size % direct_multiple(t) == 0 &&
           reinterpret_cast<uint64_t>(t.address) % static_cast<uint64_t>(t.memory_alignment) == 0;
}

// The block of `t` that begins `at` bytes into it. The odd bytes at the end of a direct request are a block of their own.
int64_t block_length(const infinity_aio_transfer &t, int64_t at, int64_t block_size) {
    const int64_t length = std::min(block_size, t.length - at);
    const int64_t tail = length % direct_multiple(t);
    return can_be_direct(t, block_size) && tail && tail != length ? length - tail : length;
}

int64_t count_blocks(const infinity_aio_transfer &t, int64_t block_size) {
    int64_t count = t.length / block_size;
    for (int64_t at = count * block_size; at < t.length; at += block_length(t, at, block_size))
        ++count;
    return count;
}

} // namespace

void infinity_aio_engine::Queue::append(Request *request) {
    request->next = nullptr;
    (first ? last->next : first) = request;
    last = request;
}

void infinity_aio_engine::Queue::drop_first() { first = first->next; }

infinity_aio_engine::infinity_aio_engine(std::unique_ptr<Transport> transport, int64_t block_size)
    : transport_(std::move(transport)), block_size_(block_size), blocks_(transport_->capacity()) {
    for (uint32_t slot = transport_->capacity(); slot-- > 0;)
        free_.push_back(slot);
    SignalsBlocked blocked;
    thread_ = std::thread([this] { run(); });
}

infinity_aio_engine::~infinity_aio_engine() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    transport_->wake();
    thread_.join();
}

void infinity_aio_engine::submit(Request *request) {
    if (request->transfer.length == 0) {
        request->complete();
        return;
    }
    bool wake;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        request->first_index = next_index_;
        next_index_ += static_cast<uint64_t>(count_blocks(request->transfer, block_size_));
        submitted_.append(request);
        wake = asleep_;
        asleep_ = false;
    }
    if (wake)
        transport_->wake();
}

void infinity_aio_engine::run() {
    pthread_setname_np(pthread_self(), "infinity-io");
    std::vector<Completion> completions(blocks_.size());
    for (;;) {
        take_submitted(); // before filling: new requests get their share of the slots that became free
        Next next;
        do {
            fill();
            next = take_submitted();
        } while (next == Next::FILL);
        if (next == Next::END)
            return;
        const size_t count = transport_->reap(completions.data(), completions.size(), true);
        for (size_t i = 0; i < count; ++i)
            finish(completions[i]);
    }
}

infinity_aio_engine::Next infinity_aio_engine::take_submitted() {
    Request *request;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        request = submitted_.first;
        submitted_ = Queue{};
        if (!request) {
            // With blocks still waiting for a free slot, the next completion makes us look again without being woken.
            asleep_ = waiting_ == 0;
            return stopping_ && waiting_ == 0 && free_.size() == blocks_.size() ? Next::END : Next::REAP;
        }
    }
    while (request) {
        Request *const after = request->next;
        lane_of(*request).waiting.append(request);
        ++waiting_;
        request = after;
    }
    return Next::FILL;
}

infinity_aio_engine::Lane &infinity_aio_engine::lane_of(const Request &request) {
    for (Lane &lane : lanes_)
        if (lane.device == request.transfer.device && lane.direction == request.transfer.direction)
            return lane;
    lanes_.push_back({request.transfer.device, request.transfer.direction, {}, 0});
    return lanes_.back();
}

// Of the lanes with something waiting, the one with the fewest blocks in flight; equals take turns.
infinity_aio_engine::Lane &infinity_aio_engine::next_lane() {
    Lane *best = nullptr;
    for (size_t i = 0; i < lanes_.size(); ++i) {
        Lane &lane = lanes_[(turn_ + i) % lanes_.size()];
        if (lane.waiting.first && (!best || lane.in_flight < best->in_flight))
            best = &lane;
    }
    turn_ = static_cast<size_t>(best - lanes_.data()) + 1;
    return *best;
}

void infinity_aio_engine::fill() {
    while (!free_.empty() && waiting_)
        start_block(next_lane());
}

void infinity_aio_engine::start_block(Lane &lane) {
    Request &request = *lane.waiting.first;
    const infinity_aio_transfer &t = request.transfer;
    const int64_t length = block_length(t, request.handed_out, block_size_);
    const bool direct = can_be_direct(t, block_size_) && length % direct_multiple(t) == 0;
    const uint32_t slot = free_.back();
    free_.pop_back();
    Block &block = blocks_[slot];
    block.request = &request;
    block.lane = static_cast<uint32_t>(&lane - lanes_.data());
    block.retries = 0;
    block.offset = t.offset + request.handed_out;
    block.length = length;
    block.transfer = {static_cast<int>(direct ? t.direct_fd : t.buffered_fd),
                      t.direction == INFINITY_AIO_WRITE,
                      block.offset,
                      static_cast<char *>(t.address) + request.handed_out,
                      length,
                      request.first_index + request.blocks_started,
                      0};
    request.handed_out += length;
    ++request.blocks_started;
    ++request.blocks_in_flight;
    ++lane.in_flight;
    if (request.handed_out == t.length) {
        lane.waiting.drop_first();
        --waiting_;
    }
    transport_->start(slot, block.transfer);
}

void infinity_aio_engine::finish(Completion completion) {
    Block &block = blocks_[completion.slot];
    Transfer &left = block.transfer;
    const int64_t result = completion.result;
    if (result == left.length)
        return end_block(completion.slot, 0);
    if (result == 0)
        return end_block(completion.slot, left.write ? EIO : ENODATA);
    if (result > 0) {
        block.retries = 0;
        left.offset += result;
        left.address += result;
        left.length -= result;
        if (left.fd == block.request->transfer.direct_fd && left.offset % direct_multiple(block.request->transfer))
            left.fd = static_cast<int>(block.request->transfer.buffered_fd);
    } else if ((result != -EAGAIN && result != -EINTR) || ++block.retries > MAX_RETRIES) {
        return end_block(completion.slot, static_cast<int>(-result));
    }
    ++left.attempt;
    transport_->start(completion.slot, left);
}

void infinity_aio_engine::end_block(uint32_t slot, int64_t error) {
    const Block &block = blocks_[slot];
    Request &request = *block.request;
    Lane &lane = lanes_[block.lane];
    free_.push_back(slot);
    --lane.in_flight;
    --request.blocks_in_flight;
    if (error) {
        // Of several failures the first in the file is reported, whatever their order in time.
        if (!request.failure.error || block.offset < request.failure.offset)
            request.failure = {error, block.offset, block.length};
        if (request.handed_out < request.transfer.length) { // it is the first of its lane: start no more of its blocks
            request.handed_out = request.transfer.length;
            lane.waiting.drop_first();
            --waiting_;
        }
    }
    if (request.blocks_in_flight == 0 && request.handed_out == request.transfer.length)
        request.complete();
}
