#include "fallback/host_copies.h"

#include "report/environment.h"

#include <atomic>
#include <cstring>

static std::atomic<size_t> g_taken{ 0 };

size_t neuron_fallback_bytes() {
    static const size_t limit =
        neuron_number("GGML_NEURON_FALLBACK_MEMORY", "a number of MiB", 0, SIZE_MAX >> 20, NEURON_FALLBACK_MIB) << 20;
    return limit;
}

neuron_host_copies::~neuron_host_copies() {
    for (auto & entry : copies) {
        forget(entry.second);
    }
}

void neuron_host_copies::forget(copy & c) {
    g_taken -= c.data.size();
    c.data = {};
}

bool neuron_host_copies::get(size_t offset, size_t size, uint64_t version, void * data) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto                        found = copies.find(offset);
    if (found == copies.end() || found->second.version != version || found->second.data.size() != size) {
        return false;
    }
    memcpy(data, found->second.data.data(), size);
    return true;
}

void neuron_host_copies::note(size_t offset, size_t size, uint64_t version, const void * data) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto                        found = copies.find(offset);
    if (found == copies.end() || found->second.version != version) {
        copy & c = copies[offset];
        forget(c);
        c.version = version;
        return;
    }
    copy & c = found->second;
    forget(c);
    if (g_taken.fetch_add(size) + size > neuron_fallback_bytes()) {
        g_taken -= size;
        return;
    }
    c.data.assign((const uint8_t *) data, (const uint8_t *) data + size);
}
