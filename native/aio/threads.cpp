// Moves blocks with pread and pwrite in a pool of threads: works on every machine.
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

#include "descriptor.h"
#include "transport.h"

namespace infinity::aio {
namespace {

int64_t transfer_now(const Transfer &transfer) {
    ssize_t moved;
    do {
        moved = transfer.write ? ::pwrite(transfer.fd, transfer.address, transfer.length, transfer.offset)
                               : ::pread(transfer.fd, transfer.address, transfer.length, transfer.offset);
    } while (moved < 0 && errno == EINTR);
    return moved < 0 ? -errno : moved;
}

class Threads final : public Transport {
public:
    Threads(uint32_t depth, uint32_t threads) : capacity_(depth) {
        SignalsBlocked blocked;
        try {
            for (uint32_t i = 0; i < threads; ++i)
                workers_.emplace_back([this] { work(); });
        } catch (...) {
            stop();
            throw;
        }
    }

    ~Threads() override { stop(); }

    uint32_t capacity() const override { return capacity_; }

    void start(uint32_t slot, const Transfer &transfer) override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            todo_.push_back({slot, transfer});
        }
        work_there_.notify_one();
    }

    size_t reap(Completion *out, size_t room, bool block) override {
        std::unique_lock<std::mutex> lock(mutex_);
        if (block)
            something_done_.wait(lock, [this] { return !done_.empty() || woken_; });
        woken_ = false;
        size_t count = 0;
        while (count < room && !done_.empty()) {
            out[count++] = done_.front();
            done_.pop_front();
        }
        return count;
    }

    void wake() override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            woken_ = true;
        }
        something_done_.notify_one();
    }

private:
    struct Job {
        uint32_t slot;
        Transfer transfer;
    };

    void work() {
        pthread_setname_np(pthread_self(), "infinity-io");
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            work_there_.wait(lock, [this] { return !todo_.empty() || stopping_; });
            if (todo_.empty())
                return;
            const Job job = todo_.front();
            todo_.pop_front();
            lock.unlock();
            const Completion completion{job.slot, transfer_now(job.transfer)};
            lock.lock();
            done_.push_back(completion);
            something_done_.notify_one();
        }
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        work_there_.notify_all();
        for (std::thread &worker : workers_)
            worker.join();
    }

    const uint32_t capacity_;
    std::mutex mutex_;
    std::condition_variable work_there_, something_done_;
    std::deque<Job> todo_;
    std::deque<Completion> done_;
    bool woken_ = false, stopping_ = false;
    std::vector<std::thread> workers_;
};

} // namespace

int64_t open_threads(uint32_t depth, uint32_t threads, std::unique_ptr<Transport> &transport) {
    // Two blocks per thread: one on its way, one waiting, so that no thread idles until the next round.
    transport = std::make_unique<Threads>(std::min(depth, 2 * threads), threads);
    return 0;
}

} // namespace infinity::aio
