// Tests every backend that runs on this machine through the C interface.
#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "aio.h"
#include "engine.h"
#include "transport.h"

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                               \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

#define CHECK_EQUAL(found, expected)                                                                                   \
    do {                                                                                                               \
        const long long found_ = static_cast<long long>(found), expected_ = static_cast<long long>(expected);          \
        if (found_ != expected_) {                                                                                     \
            std::fprintf(stderr, "%s:%d: %s is %lld, expected %lld\n", __FILE__, __LINE__, #found, found_, expected_); \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

namespace {

constexpr int64_t PAGE = 4096, BLOCK = 16 * PAGE;

struct Directory {
    Directory() {
        const char *base = std::getenv("TMPDIR");
        path = std::string(base ? base : "/tmp") + "/infinity-aio-XXXXXX";
        CHECK(::mkdtemp(path.data()));
    }
    ~Directory() { ::rmdir(path.c_str()); }
    std::string path;
};

struct File {
    explicit File(const Directory &directory, const char *name = "file") : path(directory.path + "/" + name) {
        buffered = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        CHECK(buffered >= 0);
        direct = ::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC); // -1 on a file system without it
    }
    ~File() {
        if (direct >= 0)
            ::close(direct);
        ::close(buffered);
        ::unlink(path.c_str());
    }
    std::string path;
    int buffered, direct;
    uint64_t device = 0;
};

struct Memory {
    explicit Memory(int64_t size) : size(size), data(static_cast<char *>(::aligned_alloc(PAGE, rounded(size)))) {
        CHECK(data);
        std::memset(data, 0, rounded(size));
    }
    ~Memory() { std::free(data); }
    Memory(const Memory &) = delete;
    static size_t rounded(int64_t size) { return static_cast<size_t>((size + 2 * PAGE - 1) / PAGE * PAGE); }
    void fill(unsigned seed) {
        std::mt19937 random(seed);
        for (int64_t i = 0; i < size; ++i)
            data[i] = static_cast<char>(random());
    }
    int64_t size;
    char *data;
};

infinity_aio_faults no_faults() { return {7, 0.0, 0.0, EIO, 0.0, 0, -1}; }

struct Engine {
    explicit Engine(int64_t backend, const infinity_aio_faults *faults = nullptr, int64_t depth = 8, int64_t block = BLOCK) {
        const infinity_aio_options options{backend, depth, block, 3, faults};
        CHECK_EQUAL(infinity_aio_open(&options, &handle), 0);
    }
    ~Engine() { close(); }
    void close() {
        if (handle)
            infinity_aio_close(handle);
        handle = nullptr;
    }
    infinity_aio_request *start(const File &file, int64_t direction, int64_t offset, char *address, int64_t length) {
        const infinity_aio_transfer t{file.direct, file.buffered, 512, 512, file.device, direction, offset, address, length};
        infinity_aio_request *request = nullptr;
        CHECK_EQUAL(infinity_aio_submit(handle, &t, &request), 0);
        return request;
    }
    infinity_aio_request *read(const File &file, int64_t offset, char *address, int64_t length) {
        return start(file, INFINITY_AIO_READ, offset, address, length);
    }
    infinity_aio_request *write(const File &file, int64_t offset, char *address, int64_t length) {
        return start(file, INFINITY_AIO_WRITE, offset, address, length);
    }
    infinity_aio_engine *handle = nullptr;
};

int64_t finish(infinity_aio_request *request, infinity_aio_failure *failure = nullptr) {
    const int64_t result = infinity_aio_wait(request, -1, failure);
    CHECK_EQUAL(infinity_aio_done(request), 1);
    infinity_aio_release(request);
    return result;
}

bool same(const Memory &a, const Memory &b, int64_t length) {
    return std::memcmp(a.data, b.data, static_cast<size_t>(length)) == 0;
}

void round_trip(int64_t backend, const infinity_aio_faults *faults, int64_t offset, int64_t length, int64_t skew = 0) {
    Directory directory;
    File file(directory);
    Memory out(length + skew), in(length + skew);
    out.fill(static_cast<unsigned>(length));
    Engine engine(backend, faults);
    CHECK_EQUAL(finish(engine.write(file, offset, out.data + skew, length)), 0);
    CHECK_EQUAL(finish(engine.read(file, offset, in.data + skew, length)), 0);
    CHECK(std::memcmp(out.data + skew, in.data + skew, static_cast<size_t>(length)) == 0);
    for (int64_t i = 0; i < skew; ++i)
        CHECK_EQUAL(in.data[i], 0);
    for (size_t i = static_cast<size_t>(length + skew); i < Memory::rounded(length + skew); ++i)
        CHECK_EQUAL(in.data[i], 0);
}

void sizes_and_offsets(int64_t backend) {
    for (int64_t length : {int64_t{1}, int64_t{511}, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 512, 5 * BLOCK + 3 * PAGE + 77})
        for (int64_t offset : {int64_t{0}, PAGE, int64_t{512}, int64_t{13}})
            round_trip(backend, nullptr, offset, length);
    round_trip(backend, nullptr, PAGE, 3 * BLOCK, 64); // an address that direct I/O cannot take
}

// Neighbouring odd-sized extents in one file, all in flight: no page may be torn between direct and buffered writes.
void odd_neighbours(int64_t backend) {
    Directory directory;
    File file(directory);
    constexpr int64_t COUNT = 24, LENGTH = 2 * BLOCK + 1000, STRIDE = 3 * BLOCK;
    Memory out(COUNT * STRIDE), in(COUNT * STRIDE);
    out.fill(3);
    Engine engine(backend);
    std::vector<infinity_aio_request *> requests;
    for (int64_t i = 0; i < COUNT; ++i)
        requests.push_back(engine.write(file, i * STRIDE, out.data + i * STRIDE, LENGTH));
    for (auto *request : requests)
        CHECK_EQUAL(finish(request), 0);
    requests.clear();
    for (int64_t i = 0; i < COUNT; ++i)
        requests.push_back(engine.read(file, i * STRIDE, in.data + i * STRIDE, LENGTH));
    for (auto *request : requests)
        CHECK_EQUAL(finish(request), 0);
    for (int64_t i = 0; i < COUNT; ++i)
        CHECK(std::memcmp(in.data + i * STRIDE, out.data + i * STRIDE, LENGTH) == 0);
}

void many_files_and_directions(int64_t backend) {
    Directory first, second;
    File a(first, "a"), b(first, "b"), c(second, "c");
    c.device = 1;
    constexpr int64_t COUNT = 12, LENGTH = 3 * BLOCK;
    Memory out(COUNT * LENGTH), in(COUNT * LENGTH), next(COUNT * LENGTH);
    out.fill(1);
    next.fill(2);
    Engine engine(backend);
    const File *files[] = {&a, &b, &c};
    std::vector<infinity_aio_request *> requests;
    const auto at = [](int64_t i) { return (i / 3) * LENGTH; };
    for (int64_t i = 0; i < COUNT; ++i)
        requests.push_back(engine.write(*files[i % 3], at(i), out.data + i * LENGTH, LENGTH));
    for (auto *request : requests)
        CHECK_EQUAL(finish(request), 0);
    requests.clear();
    for (int64_t i = 0; i < COUNT; ++i) { // reads of one half of the files while the other half is written
        requests.push_back(engine.read(*files[i % 3], at(i), in.data + i * LENGTH, LENGTH));
        requests.push_back(engine.write(*files[i % 3], at(i) + COUNT * LENGTH, next.data + i * LENGTH, LENGTH));
    }
    for (auto *request : requests)
        CHECK_EQUAL(finish(request), 0);
    CHECK(same(in, out, COUNT * LENGTH));
    requests.clear();
    for (int64_t i = 0; i < COUNT; ++i)
        requests.push_back(engine.read(*files[i % 3], at(i) + COUNT * LENGTH, in.data + i * LENGTH, LENGTH));
    for (auto *request : requests)
        CHECK_EQUAL(finish(request), 0);
    CHECK(same(in, next, COUNT * LENGTH));
}

void many_threads(int64_t backend) {
    Directory directory;
    File file(directory);
    Engine engine(backend);
    constexpr int64_t LENGTH = 2 * BLOCK + PAGE, STRIDE = 3 * BLOCK;
    std::vector<std::thread> threads;
    for (int64_t t = 0; t < 4; ++t)
        threads.emplace_back([&, t] {
            Memory out(LENGTH), in(LENGTH);
            for (int64_t round = 0; round < 10; ++round) {
                const int64_t offset = (t * 10 + round) * STRIDE;
                out.fill(static_cast<unsigned>(offset));
                CHECK_EQUAL(finish(engine.write(file, offset, out.data, LENGTH)), 0);
                CHECK_EQUAL(finish(engine.read(file, offset, in.data, LENGTH)), 0);
                CHECK(same(in, out, LENGTH));
            }
        });
    for (std::thread &thread : threads)
        thread.join();
}

// Blocks in registered memory, across the border of two regions, outside of any: the same bytes.
void registered_memory(int64_t backend) {
    Directory directory;
    File file(directory);
    Memory source(16 * BLOCK), into(16 * BLOCK);
    source.fill(11);
    Engine engine(backend);
    const infinity_aio_region regions[] = {{source.data, 5 * BLOCK + PAGE},
                                           {source.data + 5 * BLOCK + PAGE, 4 * BLOCK},
                                           {into.data, 8 * BLOCK}};
    const int64_t registered = infinity_aio_register(engine.handle, regions, 3);
    CHECK(registered == 0 || registered == 3);
    CHECK_EQUAL(finish(engine.write(file, 0, source.data, source.size)), 0);
    CHECK_EQUAL(finish(engine.read(file, 0, into.data, into.size)), 0);
    CHECK_EQUAL(std::memcmp(source.data, into.data, static_cast<size_t>(source.size)), 0);
    const infinity_aio_region nowhere{nullptr, 1}, empty{source.data, 0};
    CHECK_EQUAL(infinity_aio_register(engine.handle, &nowhere, 1), -EINVAL);
    CHECK_EQUAL(infinity_aio_register(engine.handle, &empty, 1), -EINVAL);
    CHECK_EQUAL(infinity_aio_register(engine.handle, nullptr, 1), -EINVAL);
}

void many_waiters(int64_t backend) {
    Directory directory;
    File file(directory);
    Memory out(4 * BLOCK);
    infinity_aio_faults faults = no_faults();
    faults.fail_at = 2;
    Engine engine(backend, &faults);
    infinity_aio_request *request = engine.write(file, 0, out.data, out.size);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
        threads.emplace_back([&] {
            infinity_aio_failure failure{};
            CHECK_EQUAL(infinity_aio_wait(request, -1, &failure), -EIO);
            CHECK_EQUAL(failure.offset, 2 * BLOCK);
        });
    for (std::thread &thread : threads)
        thread.join();
    CHECK_EQUAL(finish(request), -EIO); // as often as wanted
}

// Requests that nobody waits for still happen, and neither leak nor touch freed memory.
void forgotten(int64_t backend) {
    Directory directory;
    File file(directory);
    Memory out(40 * BLOCK), in(40 * BLOCK);
    out.fill(5);
    Engine engine(backend, nullptr, 2);
    for (int64_t i = 0; i < 20; ++i)
        infinity_aio_release(engine.write(file, i * 2 * BLOCK, out.data + i * 2 * BLOCK, 2 * BLOCK));
    engine.close();
    CHECK_EQUAL(::pread(file.buffered, in.data, static_cast<size_t>(in.size), 0), in.size);
    CHECK(same(in, out, in.size));
}

void outlives_engine(int64_t backend) {
    Directory directory;
    File file(directory);
    Memory out(2 * BLOCK);
    Engine engine(backend);
    infinity_aio_request *request = engine.write(file, 0, out.data, out.size);
    engine.close();
    CHECK_EQUAL(infinity_aio_done(request), 1);
    CHECK_EQUAL(finish(request), 0);
}

void nothing_to_do(int64_t backend) {
    Directory directory;
    File file(directory);
    Engine engine(backend);
    CHECK_EQUAL(finish(engine.read(file, 12345, nullptr, 0)), 0);
}

void past_the_end(int64_t backend) {
    Directory directory;
    File file(directory);
    Memory out(3 * BLOCK), in(3 * BLOCK);
    out.fill(9);
    Engine engine(backend);
    CHECK_EQUAL(finish(engine.write(file, 0, out.data, BLOCK + 100)), 0);
    infinity_aio_failure failure{};
    CHECK_EQUAL(finish(engine.read(file, 0, in.data, 3 * BLOCK), &failure), -ENODATA);
    CHECK_EQUAL(failure.offset, BLOCK);
    CHECK_EQUAL(failure.length, BLOCK);
    CHECK(same(in, out, BLOCK + 100)); // what there was did arrive
    CHECK_EQUAL(finish(engine.read(file, 10 * BLOCK, in.data, PAGE), &failure), -ENODATA);
    CHECK_EQUAL(failure.offset, 10 * BLOCK);
    CHECK_EQUAL(failure.length, PAGE);
}

void bad_descriptors(int64_t backend) {
    Directory directory;
    Memory memory(2 * BLOCK);
    Engine engine(backend);
    int closed;
    {
        File file(directory);
        closed = file.buffered;
    }
    infinity_aio_transfer t{-1, closed, 512, 512, 0, INFINITY_AIO_WRITE, PAGE, memory.data, 2 * BLOCK};
    infinity_aio_request *request = nullptr;
    infinity_aio_failure failure{};
    CHECK_EQUAL(infinity_aio_submit(engine.handle, &t, &request), 0);
    CHECK_EQUAL(finish(request, &failure), -EBADF);
    CHECK_EQUAL(failure.error, EBADF);
    CHECK_EQUAL(failure.offset, PAGE);

    File file(directory); // an engine that met an error still works
    CHECK_EQUAL(finish(engine.write(file, 0, memory.data, memory.size)), 0);
    const int read_only = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
    t.buffered_fd = read_only;
    CHECK_EQUAL(infinity_aio_submit(engine.handle, &t, &request), 0);
    CHECK_EQUAL(finish(request, &failure), -EBADF);
    ::close(read_only);
}

void refuses_nonsense(int64_t backend) {
    Directory directory;
    File file(directory);
    Memory memory(PAGE);
    Engine engine(backend);
    const infinity_aio_transfer good{file.direct, file.buffered, 512, 512, 0, INFINITY_AIO_READ, 0, memory.data, PAGE};
    infinity_aio_request *request = nullptr;
    const auto refused = [&](const std::function<void(infinity_aio_transfer &)> &spoil) {
        infinity_aio_transfer t = good;
        spoil(t);
        return infinity_aio_submit(engine.handle, &t, &request) == -EINVAL;
    };
    CHECK(refused([](auto &t) { t.offset = -1; }));
    CHECK(refused([](auto &t) { t.length = -1; }));
    CHECK(refused([](auto &t) { t.offset = INT64_MAX; }));
    CHECK(refused([](auto &t) { t.address = nullptr; }));
    CHECK(refused([](auto &t) { t.direction = 2; }));
    CHECK(refused([](auto &t) { t.memory_alignment = 0; }));
    CHECK(refused([](auto &t) { t.buffered_fd = -1; }));
    infinity_aio_engine *handle = nullptr;
    for (const infinity_aio_options &bad :
         {infinity_aio_options{9, 8, BLOCK, 3, nullptr}, infinity_aio_options{backend, 0, BLOCK, 3, nullptr},
          infinity_aio_options{backend, 8, BLOCK + 1, 3, nullptr}, infinity_aio_options{backend, 8, 0, 3, nullptr},
          infinity_aio_options{backend, 8, BLOCK, 0, nullptr}, infinity_aio_options{backend, 100000, BLOCK, 3, nullptr}})
        CHECK_EQUAL(infinity_aio_open(&bad, &handle), -EINVAL);
}

void file_size_limit(int64_t backend) {
    Directory directory;
    File file(directory);
    Memory memory(4 * BLOCK);
    Engine engine(backend);
    rlimit before;
    CHECK_EQUAL(::getrlimit(RLIMIT_FSIZE, &before), 0);
    const rlimit small{static_cast<rlim_t>(2 * BLOCK), before.rlim_max};
    CHECK_EQUAL(::setrlimit(RLIMIT_FSIZE, &small), 0);
    infinity_aio_failure failure{};
    CHECK_EQUAL(finish(engine.write(file, 0, memory.data, memory.size), &failure), -EFBIG);
    CHECK_EQUAL(failure.offset, 2 * BLOCK);
    CHECK_EQUAL(failure.length, BLOCK);
    CHECK_EQUAL(::setrlimit(RLIMIT_FSIZE, &before), 0);
}

void short_transfers(int64_t backend) {
    infinity_aio_faults faults = no_faults();
    for (double probability : {0.3, 1.0}) {
        faults.short_probability = probability;
        for (uint64_t seed : {1, 2, 3}) {
            faults.seed = seed;
            round_trip(backend, &faults, 0, 5 * BLOCK + 777);
            round_trip(backend, &faults, 100, 3 * BLOCK + 1);
        }
    }
}

void every_fault_at_once(int64_t backend) {
    infinity_aio_faults faults = no_faults();
    faults.short_probability = 0.5;
    faults.delay_seconds = 0.002;
    faults.reorder = 1;
    for (uint64_t seed : {1, 2}) {
        faults.seed = seed;
        round_trip(backend, &faults, PAGE, 20 * BLOCK + 5);
    }
    faults.fail_probability = 0.2; // "again" is not an error: the block is tried again
    faults.error = EAGAIN;
    round_trip(backend, &faults, PAGE, 20 * BLOCK + 5);
    faults.fail_probability = 1.0; // but not for ever
    Directory directory;
    File file(directory);
    Memory out(3 * BLOCK);
    Engine engine(backend, &faults);
    CHECK_EQUAL(finish(engine.write(file, 0, out.data, out.size)), -EAGAIN);
}

void failing_block(int64_t backend) {
    Directory directory;
    File file(directory);
    Memory out(8 * BLOCK), in(8 * BLOCK);
    out.fill(4);
    for (int64_t reorder : {0, 1})
        for (int64_t at : {0, 3, 7}) {
            infinity_aio_faults faults = no_faults();
            faults.fail_at = 8 + at; // of the second request
            faults.error = ENOSPC;
            faults.reorder = reorder;
            Engine engine(backend, &faults);
            CHECK_EQUAL(finish(engine.write(file, 0, out.data, out.size)), 0);
            infinity_aio_failure failure{};
            CHECK_EQUAL(finish(engine.read(file, 0, in.data, in.size), &failure), -ENOSPC);
            CHECK_EQUAL(failure.error, ENOSPC);
            CHECK_EQUAL(failure.offset, at * BLOCK);
            CHECK_EQUAL(failure.length, BLOCK);
            CHECK_EQUAL(finish(engine.read(file, 0, in.data, in.size)), 0);
            CHECK(same(in, out, in.size));
        }
}

// Which requests fail depends on the seed alone, not on timing.
std::string failures(int64_t backend, uint64_t seed, double delay) {
    Directory directory;
    File file(directory);
    Memory out(32 * BLOCK);
    infinity_aio_faults faults = no_faults();
    faults.seed = seed;
    faults.fail_probability = 0.2;
    faults.delay_seconds = delay;
    Engine engine(backend, &faults);
    std::vector<infinity_aio_request *> requests;
    for (int64_t i = 0; i < 16; ++i)
        requests.push_back(engine.write(file, i * 2 * BLOCK, out.data + i * 2 * BLOCK, 2 * BLOCK));
    std::string result;
    for (auto *request : requests) {
        infinity_aio_failure failure{};
        result += finish(request, &failure) ? std::to_string(failure.offset / BLOCK) + " " : "- ";
    }
    return result;
}

void faults_repeat(int64_t backend) {
    const std::string first = failures(backend, 11, 0.0);
    CHECK(first.find_first_of("0123456789") != std::string::npos);
    CHECK(first.find('-') != std::string::npos);
    CHECK(failures(backend, 11, 0.003) == first);
    CHECK(failures(backend, 12, 0.0) != first);
    CHECK(failures(INFINITY_AIO_THREADS, 11, 0.0) == first); // nor on the backend
}

// After a failed wait nothing may still be written into the buffer: the sanitizer would see it freed.
void no_write_after_failure(int64_t backend) {
    Directory directory;
    File file(directory);
    {
        Memory out(32 * BLOCK);
        Engine engine(backend);
        CHECK_EQUAL(finish(engine.write(file, 0, out.data, out.size)), 0);
    }
    infinity_aio_faults faults = no_faults();
    faults.fail_probability = 0.3;
    faults.delay_seconds = 0.001;
    Engine engine(backend, &faults);
    for (int round = 0; round < 10; ++round) {
        auto in = std::make_unique<Memory>(32 * BLOCK);
        infinity_aio_request *request = engine.read(file, 0, in->data, in->size);
        infinity_aio_wait(request, -1, nullptr);
        std::memset(in->data, 0x5a, static_cast<size_t>(in->size));
        for (int64_t i = 0; i < in->size; ++i)
            CHECK_EQUAL(in->data[i], 0x5a);
        infinity_aio_release(request);
    }
}

// The decorator itself, over a transport that completes everything at once: order and lengths come out changed.
class Instant final : public infinity::aio::Transport {
public:
    uint32_t capacity() const override { return 16; }
    void start(uint32_t slot, const infinity::aio::Transfer &t) override { done_.push_back({slot, t.length}); }
    size_t reap(infinity::aio::Completion *out, size_t room, bool) override {
        const size_t count = std::min(room, done_.size());
        std::copy_n(done_.begin(), count, out);
        done_.erase(done_.begin(), done_.begin() + static_cast<ptrdiff_t>(count));
        return count;
    }
    void wake() override {}

private:
    std::vector<infinity::aio::Completion> done_;
};

void decorator() {
    infinity_aio_faults faults = no_faults();
    faults.reorder = 1;
    faults.short_probability = 0.5;
    auto faulty = infinity::aio::make_faulty(std::make_unique<Instant>(), faults);
    constexpr uint32_t COUNT = 16;
    for (uint32_t slot = 0; slot < COUNT; ++slot)
        faulty->start(slot, {0, false, 0, nullptr, BLOCK, slot, 0});
    infinity::aio::Completion out[COUNT];
    size_t count = 0;
    while (count < COUNT)
        count += faulty->reap(out + count, COUNT - count, true);
    bool seen[COUNT] = {}, ordered = true;
    int cut = 0;
    for (uint32_t i = 0; i < COUNT; ++i) {
        CHECK(!seen[out[i].slot]);
        seen[out[i].slot] = true;
        ordered = ordered && out[i].slot == i;
        CHECK(out[i].result > 0 && out[i].result <= BLOCK && out[i].result % PAGE == 0);
        cut += out[i].result < BLOCK;
    }
    CHECK(!ordered);
    CHECK(cut > 0 && cut < static_cast<int>(COUNT));
}

// A transport that completes what the test lets it complete, and remembers what it was asked to move.
class Scripted final : public infinity::aio::Transport {
public:
    explicit Scripted(uint32_t capacity) : capacity_(capacity) {}
    uint32_t capacity() const override { return capacity_; }
    void start(uint32_t slot, const infinity::aio::Transfer &t) override {
        std::lock_guard<std::mutex> lock(mutex_);
        started_.push_back(t);
        waiting_.push_back({slot, t.length, t.fd});
    }
    size_t reap(infinity::aio::Completion *out, size_t room, bool block) override {
        std::unique_lock<std::mutex> lock(mutex_);
        ++reaps_;
        size_t count = 0;
        const auto collect = [&] {
            for (size_t i = 0; i < waiting_.size() && count < room;) {
                if (open_ && waiting_[i].fd != held_fd_) {
                    out[count++] = {waiting_[i].slot, cut_ ? cut_ : waiting_[i].length};
                    cut_ = 0;
                    waiting_.erase(waiting_.begin() + static_cast<ptrdiff_t>(i));
                } else {
                    ++i;
                }
            }
            return count > 0 || woken_;
        };
        if (block)
            changed_.wait(lock, collect);
        else
            collect();
        woken_ = false;
        return count;
    }
    void wake() override {
        std::lock_guard<std::mutex> lock(mutex_);
        woken_ = true;
        changed_.notify_one();
    }
    // Lets everything complete, except for transfers of `held_fd`.
    void open(int held_fd = -1) {
        std::lock_guard<std::mutex> lock(mutex_);
        open_ = true;
        held_fd_ = held_fd;
        changed_.notify_one();
    }
    // The next completion moves only so many bytes.
    void cut(int64_t length) {
        std::lock_guard<std::mutex> lock(mutex_);
        cut_ = length;
    }
    int reaps() {
        std::lock_guard<std::mutex> lock(mutex_);
        return reaps_;
    }
    std::vector<infinity::aio::Transfer> started() {
        std::lock_guard<std::mutex> lock(mutex_);
        return started_;
    }

private:
    struct Waiting {
        uint32_t slot;
        int64_t length;
        int fd;
    };
    const uint32_t capacity_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<infinity::aio::Transfer> started_;
    std::vector<Waiting> waiting_;
    bool open_ = false, woken_ = false;
    int held_fd_ = -1, reaps_ = 0;
    int64_t cut_ = 0;
};

struct ScriptedEngine {
    explicit ScriptedEngine(uint32_t capacity) {
        auto transport = std::make_unique<Scripted>(capacity);
        script = transport.get();
        engine = std::make_unique<infinity_aio_engine>(std::move(transport), BLOCK);
    }
    infinity_aio_request *submit(int direct_fd, int buffered_fd, uint64_t device, int64_t direction, int64_t offset,
                                 int64_t length, int64_t address = PAGE) {
        const infinity_aio_transfer t{direct_fd, buffered_fd, 512,    512,
                                      device,    direction,   offset, reinterpret_cast<void *>(address), length};
        infinity_aio_request *request = nullptr;
        CHECK_EQUAL(infinity_aio_submit(engine.get(), &t, &request), 0);
        return request;
    }
    Scripted *script = nullptr;
    std::unique_ptr<infinity_aio_engine> engine;
};

void waiting_in_slices() {
    ScriptedEngine e(4);
    infinity_aio_request *request = e.submit(-1, 5, 0, INFINITY_AIO_READ, 0, BLOCK);
    CHECK_EQUAL(infinity_aio_done(request), 0);
    CHECK_EQUAL(infinity_aio_wait(request, 0, nullptr), 1);
    CHECK_EQUAL(infinity_aio_wait(request, 1, nullptr), 1);
    e.script->open();
    CHECK_EQUAL(finish(request), 0);
}

// While the first block holds the engine up, a long write, a long read and a write to another disk queue up behind it.
void lanes_take_turns() {
    ScriptedEngine e(4);
    std::vector<infinity_aio_request *> requests;
    requests.push_back(e.submit(-1, 9, 9, INFINITY_AIO_READ, 0, BLOCK));
    while (e.script->started().empty())
        std::this_thread::yield();
    for (int fd : {1, 2, 3})
        requests.push_back(
            e.submit(-1, fd, fd == 3 ? 1 : 0, fd == 2 ? INFINITY_AIO_READ : INFINITY_AIO_WRITE, 0, 20 * BLOCK));
    e.script->open();
    for (auto *request : requests)
        CHECK_EQUAL(finish(request), 0);
    const auto started = e.script->started();
    CHECK_EQUAL(started.size(), 61);
    int64_t next[4] = {};
    for (size_t i = 1; i < started.size(); ++i) {
        int64_t &expected = next[started[i].fd];
        CHECK_EQUAL(started[i].offset, expected); // in order within a request
        expected += BLOCK;
        // Its turn comes as often as that of the others, but for what the write got while it was alone.
        for (int fd : {2, 3})
            CHECK(next[1] - next[fd] <= 4 * BLOCK && next[fd] - next[1] <= BLOCK);
    }
}

// A disk that does not answer takes its share of the queue and no more.
void slow_disk_leaves_room() {
    ScriptedEngine e(4);
    infinity_aio_request *const first = e.submit(-1, 9, 9, INFINITY_AIO_READ, 0, 4 * BLOCK);
    while (e.script->started().size() < 4)
        std::this_thread::yield();
    const int before = e.script->reaps();
    infinity_aio_request *const slow = e.submit(-1, 1, 1, INFINITY_AIO_READ, 0, 20 * BLOCK);
    while (e.script->reaps() == before) // until it waits for a free slot; nobody will tell the engine of the next one
        std::this_thread::yield();
    infinity_aio_request *const fast = e.submit(-1, 2, 2, INFINITY_AIO_READ, 0, 20 * BLOCK);
    e.script->open(1);
    CHECK_EQUAL(finish(first), 0);
    CHECK_EQUAL(finish(fast), 0);
    CHECK_EQUAL(infinity_aio_done(slow), 0);
    int64_t slow_at_last_fast = 0, slow_so_far = 0;
    for (const auto &t : e.script->started()) {
        slow_so_far += t.fd == 1;
        if (t.fd == 2)
            slow_at_last_fast = slow_so_far;
    }
    CHECK(slow_at_last_fast >= 1 && slow_at_last_fast <= 3);
    e.script->open();
    CHECK_EQUAL(finish(slow), 0);
}

void whole_pages_are_direct() {
    ScriptedEngine e(4);
    e.script->open();
    constexpr int DIRECT = 1, BUFFERED = 2;
    const auto descriptors = [&](int64_t offset, int64_t length, int64_t address) {
        const size_t before = e.script->started().size();
        CHECK_EQUAL(finish(e.submit(DIRECT, BUFFERED, 0, INFINITY_AIO_WRITE, offset, length, address)), 0);
        std::string result;
        int64_t moved = 0;
        const auto started = e.script->started();
        for (size_t i = before; i < started.size(); ++i) {
            result += started[i].fd == DIRECT ? 'd' : 'b';
            CHECK_EQUAL(started[i].index, i);
            moved += started[i].length;
        }
        CHECK_EQUAL(moved, length);
        return result;
    };
    CHECK(descriptors(PAGE, 2 * BLOCK, PAGE) == "dd");
    CHECK(descriptors(0, PAGE, PAGE + 512) == "d");
    CHECK(descriptors(0, 2 * BLOCK + PAGE + 1, PAGE) == "dddb");
    CHECK(descriptors(0, BLOCK + 512, PAGE) == "db"); // the disk could, but the page is shared with buffered writes
    CHECK(descriptors(512, BLOCK, PAGE) == "b");
    CHECK(descriptors(0, 2 * BLOCK, PAGE + 64) == "bb");
    CHECK(descriptors(0, 17, PAGE) == "b");
}

// What a short transfer leaves is direct only if it still begins at a whole page.
void short_of_a_page() {
    for (const int64_t moved : {PAGE, int64_t{100}}) {
        ScriptedEngine e(4);
        e.script->open();
        e.script->cut(moved);
        CHECK_EQUAL(finish(e.submit(1, 2, 0, INFINITY_AIO_READ, PAGE, BLOCK)), 0);
        const auto started = e.script->started();
        CHECK_EQUAL(started.size(), 2);
        CHECK_EQUAL(started[0].fd, 1);
        CHECK_EQUAL(started[1].fd, moved == PAGE ? 1 : 2);
        CHECK_EQUAL(started[1].offset, PAGE + moved);
        CHECK_EQUAL(started[1].length, BLOCK - moved);
        CHECK_EQUAL(started[1].address - started[0].address, moved);
        CHECK_EQUAL(started[1].index, 0);
        CHECK_EQUAL(started[1].attempt, 1);
    }
}

void alignment() {
    Directory directory;
    File file(directory);
    int64_t memory = 0, offset = 0;
    const int64_t result = infinity_aio_alignment(file.direct >= 0 ? file.direct : file.buffered, &memory, &offset);
    if (result == 0) {
        CHECK(memory > 0 && (memory & (memory - 1)) == 0);
        CHECK(offset > 0 && (offset & (offset - 1)) == 0);
    } else {
        CHECK(result == -ENOSYS || result == -EOPNOTSUPP);
    }
    CHECK_EQUAL(infinity_aio_alignment(-1, &memory, &offset), -EBADF);
}

int64_t available(int64_t backend) {
    const infinity_aio_options options{backend, 8, BLOCK, 3, nullptr};
    infinity_aio_engine *engine = nullptr;
    const int64_t result = infinity_aio_open(&options, &engine);
    if (result == 0)
        infinity_aio_close(engine);
    return result;
}

struct Test {
    const char *name;
    void (*body)(int64_t backend);
};

const Test TESTS[] = {
    {"sizes_and_offsets", sizes_and_offsets},
    {"odd_neighbours", odd_neighbours},
    {"many_files_and_directions", many_files_and_directions},
    {"many_threads", many_threads},
    {"registered_memory", registered_memory},
    {"many_waiters", many_waiters},
    {"forgotten", forgotten},
    {"outlives_engine", outlives_engine},
    {"nothing_to_do", nothing_to_do},
    {"past_the_end", past_the_end},
    {"bad_descriptors", bad_descriptors},
    {"refuses_nonsense", refuses_nonsense},
    {"file_size_limit", file_size_limit},
    {"short_transfers", short_transfers},
    {"every_fault_at_once", every_fault_at_once},
    {"failing_block", failing_block},
    {"faults_repeat", faults_repeat},
    {"no_write_after_failure", no_write_after_failure},
};

} // namespace

int main() {
    std::signal(SIGXFSZ, SIG_IGN); // as in Python: the write fails with EFBIG
    int passed = 0;
    alignment();
    decorator();
    waiting_in_slices();
    lanes_take_turns();
    slow_disk_leaves_room();
    whole_pages_are_direct();
    short_of_a_page();
    passed += 7;
    CHECK_EQUAL(available(INFINITY_AIO_THREADS), 0);
    const char *names[] = {"io_uring", "aio", "threads"};
    for (int64_t backend : {INFINITY_AIO_URING, INFINITY_AIO_KERNEL, INFINITY_AIO_THREADS}) {
        if (const int64_t error = available(backend)) {
            std::printf("%s cannot run here: %s\n", names[backend], std::strerror(static_cast<int>(-error)));
            continue;
        }
        for (const Test &test : TESTS) {
            if (std::getenv("VERBOSE"))
                std::fprintf(stderr, "%s %s\n", names[backend], test.name);
            test.body(backend);
            ++passed;
        }
    }
    std::printf("native/aio: %d passed, 0 failed\n", passed);
    return 0;
}
