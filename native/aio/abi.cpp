// Checks what callers pass to the C interface, hands it to the engine, keeps exceptions in.
#include <cerrno>
#include <new>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "aio.h"
#include "engine.h"
#include "request.h"
#include "transport.h"

namespace infinity::aio {

int64_t page_size() {
    static const int64_t size = ::sysconf(_SC_PAGESIZE);
    return size;
}

namespace {

constexpr int64_t MAX_BLOCK = int64_t{1} << 30;

bool within(int64_t value, int64_t low, int64_t high) { return value >= low && value <= high; }

bool is_probability(double p) { return p >= 0.0 && p <= 1.0; }

bool valid(const infinity_aio_options &o) {
    const infinity_aio_faults *f = o.faults;
    return within(o.queue_depth, 1, 4096) && within(o.block_size, 1, MAX_BLOCK) && o.block_size % page_size() == 0 &&
           within(o.threads, 1, 256) &&
           (!f || (is_probability(f->short_probability) && is_probability(f->fail_probability) && f->error > 0 &&
                   f->delay_seconds >= 0.0 && f->delay_seconds <= 60.0));
}

bool valid(const infinity_aio_transfer &t) {
    return (t.direction == INFINITY_AIO_READ || t.direction == INFINITY_AIO_WRITE) && t.offset >= 0 && t.length >= 0 &&
           t.length <= INT64_MAX - t.offset && t.memory_alignment > 0 && t.offset_alignment > 0 &&
           within(t.direct_fd, -1, INT32_MAX) && within(t.buffered_fd, 0, INT32_MAX) && (t.address || t.length == 0);
}

int64_t open_transport(const infinity_aio_options &o, std::unique_ptr<Transport> &transport) {
    const auto depth = static_cast<uint32_t>(o.queue_depth);
    switch (o.backend) {
    case INFINITY_AIO_URING:
        return open_uring(depth, transport);
    case INFINITY_AIO_KERNEL:
        return open_kernel_aio(depth, transport);
    case INFINITY_AIO_THREADS:
        return open_threads(depth, static_cast<uint32_t>(o.threads), transport);
    default:
        return -EINVAL;
    }
}

template <class Body> int64_t without_exceptions(Body body) {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return -ENOMEM;
    } catch (const std::system_error &error) { // a thread that could not be started
        return error.code().value() > 0 ? -error.code().value() : -EAGAIN;
    } catch (...) {
        return -EIO;
    }
}

} // namespace
} // namespace infinity::aio

using namespace infinity::aio;

int64_t infinity_aio_open(const infinity_aio_options *options, infinity_aio_engine **engine) {
    return without_exceptions([&]() -> int64_t {
        if (!options || !engine || !valid(*options))
            return -EINVAL;
        std::unique_ptr<Transport> transport;
        if (const int64_t error = open_transport(*options, transport))
            return error;
        if (options->faults)
            transport = make_faulty(std::move(transport), *options->faults);
        *engine = new infinity_aio_engine(std::move(transport), options->block_size);
        return 0;
    });
}

int64_t infinity_aio_close(infinity_aio_engine *engine) {
    delete engine;
    return 0;
}

int64_t infinity_aio_register(infinity_aio_engine *engine, const infinity_aio_region *regions, int64_t count) {
    return without_exceptions([&]() -> int64_t {
        if (!engine || !within(count, 0, INT32_MAX) || (count && !regions))
            return -EINVAL;
        for (int64_t i = 0; i < count; ++i)
            if (!regions[i].address || regions[i].length <= 0)
                return -EINVAL;
        return engine->register_memory(regions, static_cast<size_t>(count)) ? count : 0;
    });
}

int64_t infinity_aio_submit(infinity_aio_engine *engine, const infinity_aio_transfer *transfer,
                            infinity_aio_request **request) {
    return without_exceptions([&]() -> int64_t {
        if (!engine || !transfer || !request || !valid(*transfer))
            return -EINVAL;
        *request = new infinity_aio_request(*transfer);
        engine->submit(*request);
        return 0;
    });
}

int64_t infinity_aio_done(infinity_aio_request *request) { return request->done() ? 1 : 0; }

int64_t infinity_aio_finished(infinity_aio_request *request) { return request->finished(); }

int64_t infinity_aio_wait(infinity_aio_request *request, int64_t timeout_milliseconds, infinity_aio_failure *failure) {
    return without_exceptions([&] { return request->wait(timeout_milliseconds, failure); });
}

int64_t infinity_aio_release(infinity_aio_request *request) {
    request->release();
    return 0;
}

int64_t infinity_aio_alignment(int64_t fd, int64_t *memory_alignment, int64_t *offset_alignment) {
#ifdef STATX_DIOALIGN
    struct statx found;
    if (::statx(static_cast<int>(fd), "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) < 0)
        return -errno;
    if (!(found.stx_mask & STATX_DIOALIGN))
        return -ENOSYS;
    if (found.stx_dio_mem_align == 0 || found.stx_dio_offset_align == 0)
        return -EOPNOTSUPP;
    *memory_alignment = found.stx_dio_mem_align;
    *offset_alignment = found.stx_dio_offset_align;
    return 0;
#else
    (void)fd, (void)memory_alignment, (void)offset_alignment;
    return -ENOSYS;
#endif
}
