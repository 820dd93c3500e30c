#include "weights.h"

#include "weights_blocks.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace simulator {

// ---- threads ---------------------------------------------------------------------------------------------------------------

// A pool with as many threads as XLA's, including the calling thread. The threads live as long as the process. Each
// thread takes the next rows of a call until none is left; the pool runs several calls one after the other.
class thread_pool {
  public:
    explicit thread_pool(size_t threads) {
        for (size_t i = 1; i < threads; i++) {
            std::thread([this] { work(); }).detach();
        }
        others_ = threads > 0 ? threads - 1 : 0;
    }

    void run(weight_function f, const weight_product & t) {
        // For calls of less than some 100 µs, another thread would start too late.
        if (others_ == 0 || t.m * t.k * std::max<size_t>(t.n, 1) < MIN_ELEMENTS) {
            f(t, 0, t.m);
            return;
        }
        const size_t chunk = std::max<size_t>((t.m + 4 * others_ + 3) / (4 * others_ + 4), 1);
        call         c     = { f, &t, chunk, { 0 }, 0 };
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            calls_.push_back(&c);
        }
        wake_.notify_all();
        c.work();
        std::unique_lock<std::mutex> lock(mutex_);
        calls_.erase(std::find(calls_.begin(), calls_.end(), &c));
        left_.wait(lock, [&c] { return c.workers == 0; });
    }

  private:
    static constexpr size_t MIN_ELEMENTS = 1 << 20;

    struct call {
        weight_function        f;
        const weight_product * t;
        size_t                 chunk;
        std::atomic<size_t>    next;
        size_t                 workers;  // other threads in the call; guarded by the mutex

        bool more() const { return next.load(std::memory_order_relaxed) < t->m; }

        void work() {
            for (size_t begin; (begin = next.fetch_add(chunk, std::memory_order_relaxed)) < t->m;) {
                f(*t, begin, std::min(begin + chunk, t->m));
            }
        }
    };

    [[noreturn]] void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            call * found = nullptr;
            wake_.wait(lock, [this, &found] {
                const auto at = std::find_if(calls_.begin(), calls_.end(), [](const call * c) { return c->more(); });
                found         = at == calls_.end() ? nullptr : *at;
                return found != nullptr;
            });
            found->workers++;
            lock.unlock();
            found->work();
            lock.lock();
            if (--found->workers == 0) {
                left_.notify_all();
            }
        }
    }

    std::mutex              mutex_;
    std::condition_variable wake_, left_;
    std::vector<call *>     calls_;
    size_t                  others_;
};

// Returns the pool. It has as many threads as the helper gives XLA.
static thread_pool & threads() {
    const char *  asked = getenv("PJRT_NPROC");
    static auto * pool =
        new thread_pool(asked != nullptr ? strtoul(asked, nullptr, 10) : 1);  // never destroyed: its threads use it
    return *pool;
}

// ---- calls ---------------------------------------------------------------------------------------------------------------

enum class vectors : size_t { avx512, avx2 };  // the caller has the same numbers

// Returns the widest vectors that the processor has and the environment allows.
static vectors widest() {
#if defined(__x86_64__)
    const char * asked = getenv("NEURON_SIMULATOR_VECTORS");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && (asked == nullptr || strcmp(asked, "avx2") != 0)) {
        return vectors::avx512;
    }
#endif
    return vectors::avx2;
}

}  // namespace simulator

using namespace simulator;

// Returns how many numbers the widest vectors hold, for tests.
extern "C" int nrt_simulator_vectors() {
    return widest() == vectors::avx512 ? 16 : 8;
}

// Computes products of a weight (first operand) and rows (second operand); the third operand is the type's lattice, if
// it has one. `options`: numbers, a space after each: the type, whether the rows are bfloat16 (else float32), m, k, n,
// and the widest vectors to use. Requires a processor with AVX2, FMA and F16C.
extern "C" void nrt_simulator_weights(void * out, const void ** in, const char * options, size_t size, void *) {
    size_t numbers[6] = {};
    size_t at         = 0;
    for (size_t i = 0; i < size && at < 6; i++) {
        if (options[i] == ' ') {
            at++;
        } else {
            numbers[at] = numbers[at] * 10 + static_cast<size_t>(options[i] - '0');
        }
    }
    static const vectors widest_here = widest();
    const auto           type        = static_cast<weight_type>(numbers[0]);
    const size_t         m = numbers[2], k = numbers[3], n = numbers[4];
    weight_product       product = { static_cast<const uint8_t *>(in[0]),
                                     static_cast<const float *>(in[1]),
                                     static_cast<float *>(out),
                                     m,
                                     k,
                                     n,
                                     has_lattice(type) ? static_cast<const uint32_t *>(in[2]) : nullptr };
    std::vector<float>   floats;
    if (numbers[1] != 0) {
        const uint16_t * rows = static_cast<const uint16_t *>(in[1]);
        floats.resize(n * k);
        for (size_t i = 0; i < floats.size(); i++) {
            const uint32_t bits = static_cast<uint32_t>(rows[i]) << 16;
            memcpy(&floats[i], &bits, sizeof(bits));
        }
        product.x = floats.data();
    }
    const bool wide = std::max(widest_here, static_cast<vectors>(numbers[5])) == vectors::avx512;
    threads().run(wide ? avx512_function(type) : avx2_function(type), product);
}
