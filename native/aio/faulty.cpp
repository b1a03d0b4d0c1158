// Injects short, failed, delayed and reordered completions between a transport and its user.
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "transport.h"

namespace infinity::aio {
namespace {

constexpr size_t REORDER_AMONG = 4;

using Clock = std::chrono::steady_clock;

enum class Draw : uint64_t { SHORT = 1, CUT = 2, FAIL = 3, DELAY = 4, ORDER = 5 };

uint64_t mix(uint64_t x) { // the finalizer of splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

class Faulty final : public Transport {
public:
    Faulty(std::unique_ptr<Transport> inner, const infinity_aio_faults &faults)
        : inner_(std::move(inner)), faults_(faults), blocks_(inner_->capacity()) {}

    uint32_t capacity() const override { return inner_->capacity(); }

    bool register_memory(const infinity_aio_region *regions, size_t count) override {
        return inner_->register_memory(regions, count);
    }

    void start(uint32_t slot, const Transfer &transfer) override {
        Transfer cut = transfer;
        const int64_t pages = (cut.length - 1) / page_size(); // whole pages that leave something to do
        if (pages > 0 && chance(transfer, Draw::SHORT) < faults_.short_probability)
            cut.length = page_size() * (1 + static_cast<int64_t>(draw(transfer, Draw::CUT) % static_cast<uint64_t>(pages)));
        blocks_[slot] = transfer;
        ++in_flight_;
        inner_->start(slot, cut);
    }

    size_t reap(Completion *out, size_t room, bool block) override {
        for (;;) {
            const bool ripe = can_release(); // only time keeps these back, so do not wait for others
            const size_t arrived = inner_->reap(out, room, block && !ripe);
            in_flight_ -= arrived;
            for (size_t i = 0; i < arrived; ++i)
                hold(out[i]);
            const size_t count = release(out, room);
            if (count || !block || (!ripe && !arrived))
                return count;
            if (ripe)
                std::this_thread::sleep_for(std::chrono::microseconds(200)); // part of the delay that was asked for
        }
    }

    void wake() override { inner_->wake(); }

private:
    struct Held {
        Completion completion;
        Clock::time_point due;
        uint64_t order;
    };

    uint64_t draw(const Transfer &t, Draw kind) const {
        return mix(faults_.seed ^ mix(t.index ^ mix(t.attempt ^ mix(static_cast<uint64_t>(kind)))));
    }
    double chance(const Transfer &t, Draw kind) const { // in [0, 1)
        return static_cast<double>(draw(t, kind) >> 11) * 0x1p-53;
    }

    void hold(Completion completion) {
        const Transfer &t = blocks_[completion.slot];
        if (static_cast<int64_t>(t.index) == faults_.fail_at || chance(t, Draw::FAIL) < faults_.fail_probability)
            completion.result = -faults_.error;
        const std::chrono::duration<double> delay(faults_.delay_seconds * chance(t, Draw::DELAY));
        held_.push_back({completion, Clock::now() + std::chrono::duration_cast<Clock::duration>(delay),
                         draw(t, Draw::ORDER)});
    }

    // When reordering, nothing goes before there are a few to mix, or no more will come.
    bool can_release() const {
        return !held_.empty() && (!faults_.reorder || held_.size() >= REORDER_AMONG || in_flight_ == 0);
    }

    size_t release(Completion *out, size_t room) {
        if (!can_release())
            return 0;
        if (faults_.reorder)
            std::sort(held_.begin(), held_.end(), [](const Held &a, const Held &b) { return a.order < b.order; });
        const Clock::time_point now = Clock::now();
        size_t count = 0;
        auto keep = held_.begin();
        for (const Held &held : held_) {
            if (held.due <= now && count < room)
                out[count++] = held.completion;
            else
                *keep++ = held;
        }
        held_.erase(keep, held_.end());
        return count;
    }

    std::unique_ptr<Transport> inner_;
    const infinity_aio_faults faults_;
    std::vector<Transfer> blocks_; // by slot, as they were asked for
    std::vector<Held> held_;
    size_t in_flight_ = 0; // in `inner_`
};

} // namespace

std::unique_ptr<Transport> make_faulty(std::unique_ptr<Transport> inner, const infinity_aio_faults &faults) {
    return std::make_unique<Faulty>(std::move(inner), faults);
}

} // namespace infinity::aio
