// Completes requests and lets callers wait for them.
#include "request.h"

#include <chrono>

int64_t infinity_aio_request::wait(int64_t timeout_milliseconds, infinity_aio_failure *failed) {
    if (!done()) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (timeout_milliseconds < 0)
            completed_.wait(lock, [this] { return done(); });
        else if (!completed_.wait_for(lock, std::chrono::milliseconds(timeout_milliseconds), [this] { return done(); }))
            return 1;
    }
    if (failed)
        *failed = failure;
    return -failure.error;
}

void infinity_aio_request::complete() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_ = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
        done_.store(true, std::memory_order_release);
    }
    completed_.notify_all();
    release();
}

void infinity_aio_request::release() {
    if (owners_.fetch_sub(1, std::memory_order_acq_rel) == 1)
        delete this;
}
