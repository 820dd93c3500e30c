// Threads that share the work on a weight when it is loaded.

#pragma once

#include "weights/layouts.h"

#include <algorithm>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

// The least bytes per thread: starting a thread takes some 20 us.
constexpr size_t NEURON_BYTES_PER_THREAD = (size_t) 256 << 10;

// Calls use(first, last), each in a thread, for ranges of `n` parts with `bytes` bytes in all. Parts should take the
// same time.
template <typename F> void neuron_in_threads(size_t n, size_t bytes, F use) {
    const size_t             n_threads = std::min({ neuron_repack_threads(), bytes / NEURON_BYTES_PER_THREAD, n });
    std::vector<std::thread> threads;
    threads.reserve(n_threads);
    size_t first = 0;
    for (size_t i = 1; i < n_threads; i++) {
        const size_t last = n * i / n_threads;
        try {
            threads.emplace_back([use, first, last] { use(first, last); });
        } catch (const std::system_error &) {
            break;  // the process has reached its limit of threads: this thread does the rest
        }
        first = last;
    }
    use(first, n);
    for (std::thread & thread : threads) {
        thread.join();
    }
}
