// Moves blocks through Linux kernel AIO, by raw system calls.
#include <cerrno>
#include <cstring>
#include <vector>

#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "descriptor.h"
#include "transport.h"

namespace infinity::aio {
namespace {

// Completions and wake-ups add to one eventfd, so one blocking read waits for both.
class KernelAio final : public Transport {
public:
    KernelAio(uint32_t depth, Descriptor event) : event_(std::move(event)), blocks_(depth), events_(depth) {
        queued_.reserve(depth);
    }

    ~KernelAio() override {
        if (context_)
            ::syscall(__NR_io_destroy, context_); // waits for what is in flight
    }

    int64_t setup() { return ::syscall(__NR_io_setup, blocks_.size(), &context_) < 0 ? -errno : 0; }

    uint32_t capacity() const override { return static_cast<uint32_t>(blocks_.size()); }

    void start(uint32_t slot, const Transfer &t) override {
        iocb &block = blocks_[slot];
        std::memset(&block, 0, sizeof block);
        block.aio_data = slot;
        block.aio_lio_opcode = t.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
        block.aio_fildes = static_cast<uint32_t>(t.fd);
        block.aio_buf = reinterpret_cast<uint64_t>(t.address);
        block.aio_nbytes = static_cast<uint64_t>(t.length);
        block.aio_offset = t.offset;
        block.aio_flags = IOCB_FLAG_RESFD;
        block.aio_resfd = static_cast<uint32_t>(event_.get());
        queued_.push_back(&block);
    }

    size_t reap(Completion *out, size_t room, bool block) override {
        size_t count = submit(out, room);
        if (block && count == 0) {
            uint64_t ignored;
            while (::read(event_.get(), &ignored, sizeof ignored) < 0 && errno == EINTR) {
            }
        }
        return count + collect(out + count, room - count);
    }

    void wake() override {
        const uint64_t one = 1;
        while (::write(event_.get(), &one, sizeof one) < 0 && errno == EINTR) {
        }
    }

private:
    // Hands over everything queued; gives the blocks that the kernel refused as failed completions.
    size_t submit(Completion *out, size_t room) {
        size_t count = 0, at = 0;
        while (at < queued_.size() && count < room) {
            const long taken = ::syscall(__NR_io_submit, context_, queued_.size() - at, queued_.data() + at);
            if (taken > 0) {
                at += static_cast<size_t>(taken);
                in_kernel_ += static_cast<size_t>(taken);
            } else if (errno == EAGAIN && in_kernel_) {
                break; // no memory for more at the moment: try again when something completed
            } else if (errno != EINTR) {
                out[count++] = {static_cast<uint32_t>(queued_[at++]->aio_data), -errno};
            }
        }
        queued_.erase(queued_.begin(), queued_.begin() + static_cast<ptrdiff_t>(at));
        return count;
    }

    size_t collect(Completion *out, size_t room) {
        if (in_kernel_ == 0 || room == 0)
            return 0;
        const size_t wanted = room < events_.size() ? room : events_.size();
        timespec now{0, 0};
        const long got = ::syscall(__NR_io_getevents, context_, 0, wanted, events_.data(), &now);
        if (got <= 0)
            return 0; // EINTR: the caller comes back
        for (long i = 0; i < got; ++i)
            out[i] = {static_cast<uint32_t>(events_[static_cast<size_t>(i)].data),
                      events_[static_cast<size_t>(i)].res};
        in_kernel_ -= static_cast<size_t>(got);
        return static_cast<size_t>(got);
    }

    aio_context_t context_ = 0;
    Descriptor event_;
    std::vector<iocb> blocks_;
    std::vector<io_event> events_;
    std::vector<iocb *> queued_;
    size_t in_kernel_ = 0;
};

} // namespace

int64_t open_kernel_aio(uint32_t depth, std::unique_ptr<Transport> &transport) {
    Descriptor event(::eventfd(0, EFD_CLOEXEC));
    if (event.get() < 0)
        return -errno;
    auto aio = std::make_unique<KernelAio>(depth, std::move(event));
    if (const int64_t error = aio->setup())
        return error;
    transport = std::move(aio);
    return 0;
}

} // namespace infinity::aio
