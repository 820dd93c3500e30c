#include "device/known_bytes.h"

#include "report/metrics.h"

#include <algorithm>
#include <cstring>

// Limits of one memory's stretches: a graph has a mask or two, and some row numbers.
static constexpr size_t MAX_STRETCHES = 32;
static constexpr size_t MAX_BYTES     = (size_t) 64 << 20;

std::shared_ptr<const uint8_t> neuron_known_bytes::get(size_t offset, size_t size) {
    for (stretch & s : stretches) {
        if (s.good && s.offset <= offset && offset + size <= s.offset + s.data->size()) {
            s.last_used = ++clock;
            return { s.data, s.data->data() + (offset - s.offset) };
        }
    }
    return nullptr;
}

void neuron_known_bytes::forget(size_t offset, size_t size) {
    for (stretch & s : stretches) {
        s.good = s.good && (s.offset + s.data->size() <= offset || offset + size <= s.offset);
    }
}

void neuron_known_bytes::set(size_t offset, const void * data, size_t size) {
    forget(offset, size);
    if (size == 0 || size > MAX_BYTES) {
        return;
    }
    const auto is_same = [&](const stretch & s) {
        return s.offset == offset && s.data->size() == size;
    };
    // The new bytes replace an old copy of the same range, which forget() has marked as outdated.
    auto into = std::find_if(stretches.begin(), stretches.end(), is_same);
    if (into == stretches.end()) {
        size_t taken = size;
        for (const stretch & s : stretches) {
            taken += s.data->size();
        }
        while (stretches.size() >= MAX_STRETCHES || taken > MAX_BYTES) {
            const auto oldest =
                std::min_element(stretches.begin(), stretches.end(),
                                 [](const stretch & a, const stretch & b) { return a.last_used < b.last_used; });
            taken -= oldest->data->size();
            stretches.erase(oldest);
        }
        into = stretches.insert(stretches.end(), stretch{ offset, nullptr });
    }
    if (!into->data || into->data.use_count() > 1) {  // someone holds the old bytes
        into->data = std::make_shared<std::vector<uint8_t>>(size);
    }
    memcpy(into->data->data(), data, size);
    into->good      = true;
    into->last_used = ++clock;
}

std::shared_ptr<const uint8_t> neuron_recall_known(const neuron_operand & from) {
    from.memory->keeps                         = true;
    const std::shared_ptr<const uint8_t> known = from.memory->known.get(from.offset, from.size);
    if (known) {
        g_metrics.recalled.fetch_add(1, std::memory_order_relaxed);
    }
    return known;
}

NRT_STATUS neuron_recall(const neuron_operand & from, std::shared_ptr<const uint8_t> & data) {
    data = neuron_recall_known(from);
    if (data) {
        return NRT_SUCCESS;
    }
    g_metrics.read_back.fetch_add(1, std::memory_order_relaxed);
    const auto       bytes  = std::make_shared<std::vector<uint8_t>>(from.size);
    const NRT_STATUS status = from.memory->read_locked(bytes->data(), from.offset, from.size);
    if (status == NRT_SUCCESS) {
        from.memory->known.set(from.offset, bytes->data(), from.size);
    }
    data = { bytes, bytes->data() };
    return status;
}
