// Moves blocks through io_uring, by raw system calls.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "descriptor.h"
#include "transport.h"

namespace infinity::aio {
namespace {

constexpr uint64_t WAKE_TAG = ~uint64_t{0};
constexpr int64_t MAX_BUFFER = int64_t{1} << 30;
constexpr size_t MAX_BUFFERS = 1 << 14; // the kernel's own limit

int uring_setup(uint32_t entries, io_uring_params *params) {
    return static_cast<int>(::syscall(__NR_io_uring_setup, entries, params));
}

int uring_enter(int fd, uint32_t to_submit, uint32_t min_complete, uint32_t flags) {
    return static_cast<int>(::syscall(__NR_io_uring_enter, fd, to_submit, min_complete, flags, nullptr, 0));
}

// A table of buffers, none of which is pinned yet.
bool uring_reserve_buffers(int fd, size_t count) {
    const std::vector<iovec> none(count);
    return ::syscall(__NR_io_uring_register, fd, IORING_REGISTER_BUFFERS, none.data(), count) >= 0;
}

bool uring_pin_buffer(int fd, size_t index, const iovec &buffer) {
    io_uring_rsrc_update2 update;
    std::memset(&update, 0, sizeof update);
    update.offset = static_cast<uint32_t>(index);
    update.data = reinterpret_cast<uint64_t>(&buffer);
    update.nr = 1;
    return ::syscall(__NR_io_uring_register, fd, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update) == 1;
}

class Mapping {
public:
    Mapping(int fd, size_t size, off_t offset)
        : size_(size),
          address_(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset)) {
        error_ = address_ == MAP_FAILED ? errno : 0;
    }
    ~Mapping() {
        if (error_ == 0)
            ::munmap(address_, size_);
    }
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;
    int error() const { return error_; }
    template <class T> T *at(uint32_t offset) const {
        return reinterpret_cast<T *>(static_cast<char *>(address_) + offset);
    }

private:
    size_t size_;
    void *address_;
    int error_;
};

class Uring final : public Transport {
public:
    Uring(uint32_t depth, Descriptor ring, Descriptor wake, const io_uring_params &p)
        : depth_(depth), ring_(std::move(ring)), wake_(std::move(wake)),
          rings_(ring_.get(),
                 std::max<size_t>(p.sq_off.array + p.sq_entries * sizeof(uint32_t),
                                  p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe)),
                 IORING_OFF_SQ_RING),
          entries_(ring_.get(), p.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
        if (error())
            return;
        sq_tail_ = rings_.at<std::atomic<uint32_t>>(p.sq_off.tail);
        sq_mask_ = *rings_.at<uint32_t>(p.sq_off.ring_mask);
        cq_head_ = rings_.at<std::atomic<uint32_t>>(p.cq_off.head);
        cq_tail_ = rings_.at<std::atomic<uint32_t>>(p.cq_off.tail);
        cq_mask_ = *rings_.at<uint32_t>(p.cq_off.ring_mask);
        cqes_ = rings_.at<io_uring_cqe>(p.cq_off.cqes);
        sqes_ = entries_.at<io_uring_sqe>(0);
        uint32_t *array = rings_.at<uint32_t>(p.sq_off.array);
        for (uint32_t i = 0; i < p.sq_entries; ++i)
            array[i] = i; // entry i always sits at place i of the ring
    }

    // The wake-up read may still be waiting: let it finish, so that the kernel is done with `wake_value_`.
    ~Uring() override {
        if (error())
            return;
        std::vector<Completion> ignored(depth_);
        stopping_ = true;
        if (wake_armed_)
            wake();
        while (wake_armed_ || in_kernel_ || queued_)
            reap(ignored.data(), ignored.size(), true);
    }

    int error() const { return rings_.error() ? rings_.error() : entries_.error(); }

    uint32_t capacity() const override { return depth_; }

    // The kernel takes at most 1 GiB as one buffer, and a block must lie in one.
    bool register_memory(const infinity_aio_region *regions, size_t count) override {
        for (size_t i = 0; i < count; ++i)
            for (int64_t at = 0; at < regions[i].length; at += MAX_BUFFER)
                buffers_.push_back({{static_cast<char *>(regions[i].address) + at,
                                     static_cast<size_t>(std::min(MAX_BUFFER, regions[i].length - at))},
                                    Pinned::NOT_YET});
        std::sort(buffers_.begin(), buffers_.end(),
                  [](const Buffer &a, const Buffer &b) { return a.memory.iov_base < b.memory.iov_base; });
        if (buffers_.size() <= MAX_BUFFERS && uring_reserve_buffers(ring_.get(), buffers_.size()))
            return true;
        buffers_.clear();
        return false;
    }

    void start(uint32_t slot, const Transfer &t) override {
        io_uring_sqe *sqe = next_entry();
        const int buffer = pinned_buffer_of(t);
        if (buffer >= 0) {
            sqe->opcode = t.write ? IORING_OP_WRITE_FIXED : IORING_OP_READ_FIXED;
            sqe->buf_index = static_cast<uint16_t>(buffer);
        } else {
            sqe->opcode = t.write ? IORING_OP_WRITE : IORING_OP_READ;
        }
        sqe->fd = t.fd;
        sqe->off = static_cast<uint64_t>(t.offset);
        sqe->addr = reinterpret_cast<uint64_t>(t.address);
        sqe->len = static_cast<uint32_t>(t.length);
        sqe->user_data = slot;
    }

    size_t reap(Completion *out, size_t room, bool block) override {
        if (!wake_armed_ && !stopping_)
            arm_wake();
        woken_ = false;
        size_t count = collect(out, room);
        while (queued_ || (block && count == 0 && !woken_)) {
            // Waiting for a few at a time saves changes of threads, but made a training step on NVMe a tenth longer.
            const uint32_t wanted = block && count == 0 && !woken_ ? 1 : 0;
            const int taken = uring_enter(ring_.get(), queued_, wanted, wanted ? IORING_ENTER_GETEVENTS : 0);
            if (taken >= 0) {
                queued_ -= static_cast<uint32_t>(taken);
                in_kernel_ += static_cast<uint32_t>(taken);
            } else if ((errno == EAGAIN || errno == EBUSY) && in_kernel_ > 1) {
                // No memory for new requests, or completions to be collected first. One of those in the kernel may be
                // the wake-up read, so another completes without anybody's help.
                uring_enter(ring_.get(), 0, 1, IORING_ENTER_GETEVENTS);
            } else if (errno != EINTR) {
                count += refuse_queued(out + count, room - count, errno);
            }
            count += collect(out + count, room - count);
            if (count == room)
                break;
        }
        return count;
    }

    void wake() override {
        const uint64_t one = 1;
        while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
        }
    }

private:
    enum class Pinned { NOT_YET, YES, REFUSED };
    struct Buffer {
        iovec memory;
        Pinned pinned;
    };

    // The buffer that holds all of a block, or -1. Pinning makes memory resident, so it waits for the first use.
    int pinned_buffer_of(const Transfer &t) {
        const auto after = std::upper_bound(buffers_.begin(), buffers_.end(), t.address,
                                            [](const char *address, const Buffer &b) { return address < b.memory.iov_base; });
        if (after == buffers_.begin())
            return -1;
        Buffer &buffer = *(after - 1);
        if (t.address + t.length > static_cast<char *>(buffer.memory.iov_base) + buffer.memory.iov_len)
            return -1;
        const int index = static_cast<int>(after - 1 - buffers_.begin());
        if (buffer.pinned == Pinned::NOT_YET)
            buffer.pinned = uring_pin_buffer(ring_.get(), index, buffer.memory) ? Pinned::YES : Pinned::REFUSED;
        return buffer.pinned == Pinned::YES ? index : -1;
    }

    io_uring_sqe *next_entry() {
        const uint32_t tail = sq_tail_->load(std::memory_order_relaxed);
        io_uring_sqe *sqe = &sqes_[tail & sq_mask_];
        std::memset(sqe, 0, sizeof *sqe);
        sq_tail_->store(tail + 1, std::memory_order_release); // the kernel looks only inside io_uring_enter
        ++queued_;
        return sqe;
    }

    void arm_wake() {
        io_uring_sqe *sqe = next_entry();
        sqe->opcode = IORING_OP_READ;
        sqe->fd = wake_.get();
        sqe->addr = reinterpret_cast<uint64_t>(&wake_value_);
        sqe->len = sizeof wake_value_;
        sqe->user_data = WAKE_TAG;
        wake_armed_ = true;
    }

    size_t collect(Completion *out, size_t room) {
        uint32_t head = cq_head_->load(std::memory_order_relaxed);
        const uint32_t tail = cq_tail_->load(std::memory_order_acquire);
        size_t count = 0;
        while (head != tail && count < room) {
            const io_uring_cqe &cqe = cqes_[head++ & cq_mask_];
            --in_kernel_;
            if (cqe.user_data == WAKE_TAG) {
                wake_armed_ = false;
                woken_ = true;
            } else {
                out[count++] = {static_cast<uint32_t>(cqe.user_data), cqe.res};
            }
        }
        cq_head_->store(head, std::memory_order_release);
        return count;
    }

    // io_uring_enter itself failed: takes back what it did not accept and reports it as failed.
    size_t refuse_queued(Completion *out, size_t room, int error) {
        size_t count = 0;
        uint32_t tail = sq_tail_->load(std::memory_order_relaxed);
        while (queued_ && count < room) {
            const io_uring_sqe &sqe = sqes_[--tail & sq_mask_];
            --queued_;
            if (sqe.user_data == WAKE_TAG)
                wake_armed_ = false, woken_ = true; // nobody could wake us: come back, to arm it again
            else
                out[count++] = {static_cast<uint32_t>(sqe.user_data), -error};
        }
        sq_tail_->store(tail, std::memory_order_release);
        return count;
    }

    const uint32_t depth_;
    Descriptor ring_, wake_;
    Mapping rings_, entries_;
    std::atomic<uint32_t> *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t sq_mask_ = 0, cq_mask_ = 0;
    io_uring_cqe *cqes_ = nullptr;
    io_uring_sqe *sqes_ = nullptr;
    std::vector<Buffer> buffers_; // by address; places are those of the kernel's table
    uint32_t queued_ = 0;    // entries that the kernel has not taken yet
    uint32_t in_kernel_ = 0; // taken, not completed
    uint64_t wake_value_ = 0;
    bool wake_armed_ = false, woken_ = false, stopping_ = false;
};

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the rings are shared with the kernel as plain words");

} // namespace

int64_t open_uring(uint32_t depth, std::unique_ptr<Transport> &transport) {
    io_uring_params params;
    std::memset(&params, 0, sizeof params);
    Descriptor ring(uring_setup(depth + 1, &params)); // one more for the wake-up read
    if (ring.get() < 0)
        return -errno;
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !(params.features & IORING_FEAT_RW_CUR_POS))
        return -EOPNOTSUPP; // before Linux 5.6, which has no IORING_OP_READ
    Descriptor wake(::eventfd(0, EFD_CLOEXEC));
    if (wake.get() < 0)
        return -errno;
    auto uring = std::make_unique<Uring>(depth, std::move(ring), std::move(wake), params);
    if (uring->error())
        return -uring->error();
    transport = std::move(uring);
    return 0;
}

} // namespace infinity::aio
