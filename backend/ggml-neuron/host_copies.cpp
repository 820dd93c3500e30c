#include "host_copies.h"

#include "log.h"
#include "variables.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

static std::atomic<size_t> g_taken{ 0 };

// Reads how many bytes all copies may take. Says once when the variable is not such a number.
static size_t read_limit() {
    static const size_t limit = [] {
        const std::string text  = neuron_variable("GGML_NEURON_FALLBACK_MEMORY");
        char *            end   = nullptr;
        unsigned long     value = strtoul(text.c_str(), &end, 10);
        if (text.empty()) {
            value = NEURON_FALLBACK_MIB;
        } else if (text[0] < '0' || text[0] > '9' || *end || value > SIZE_MAX >> 20) {
            NEURON_WARN("GGML_NEURON_FALLBACK_MEMORY is a number of MiB, not '%s'\n", text.c_str());
            value = NEURON_FALLBACK_MIB;
        }
        return (size_t) value << 20;
    }();
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
    if (g_taken.fetch_add(size) + size > read_limit()) {
        g_taken -= size;
        return;
    }
    c.data.assign((const uint8_t *) data, (const uint8_t *) data + size);
}
