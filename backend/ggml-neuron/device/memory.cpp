// The memory of a NeuronCore.

#include "../../nrt/targets.h"
#include "device/core.h"
#include "report/environment.h"
#include "report/log.h"
#include "report/metrics.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

// The smallest scratch memory; it grows by doubling.
static constexpr size_t MIN_SCRATCH = 1 << 20;

// The smallest memory for kernels' numbers, and the most different numbers that are kept.
static constexpr size_t MIN_NUMBERS = 1 << 16;
static constexpr size_t MAX_NUMBERS = 1 << 13;

// Returns the status; reports and keeps a failure.
NRT_STATUS neuron_memory::checked(NRT_STATUS status, const char * function, size_t offset, size_t n) {
    if (status != NRT_SUCCESS) {
        failure = "core " + std::to_string(core->vnc) + ": " + core->nrt.describe(function, status) + ": " +
                  std::to_string(n) + " bytes at offset " + std::to_string(offset) + " of " + std::to_string(size);
        NEURON_ERROR("%s\n", failure.c_str());
    }
    return status;
}

std::string neuron_memory::stage(const void * data, size_t offset, size_t n, size_t room) {
    std::lock_guard<std::mutex> lock(core->mutex);
    size_t                      taken  = n;
    bool                        others = false;  // other staged writes overlap the bytes
    neuron_staged *             same   = nullptr;
    for (neuron_staged & s : staged) {
        taken += s.data.size();
        if (s.offset == offset && s.data.size() == n) {
            same = &s;
        } else {
            others = others || (s.offset < offset + n && offset < s.offset + s.data.size());
        }
    }
    if (same) {
        memcpy(same->data.data(), data, n);
        return "";
    }
    if ((others || taken > NEURON_MAX_STAGED) && write_staged() != NRT_SUCCESS) {
        return failure;
    }
    if (n > NEURON_MAX_STAGED) {
        if (write_locked(data, offset, n) != NRT_SUCCESS) {
            return failure;
        }
        known.set(offset, data, n);
        return "";
    }
    const auto * bytes = (const uint8_t *) data;
    staged.push_back({ offset, room, std::vector<uint8_t>(bytes, bytes + n) });
    return "";
}

// Waits for a launch that uses staged bytes. Returns false when there is none; the mutex stays locked then.
bool neuron_memory::wait_to_write_staged() {
    for (const neuron_staged & s : staged) {
        const neuron_use use = { this, s.offset, std::max(s.room, s.data.size()), true };
        if (core->launch_queue.is_used(use)) {
            core->launch_queue.wait_for_use(use);
            return true;
        }
    }
    return false;
}

NRT_STATUS neuron_memory::write_staged() {
    while (wait_to_write_staged()) {
        // another thread may have staged more meanwhile, or written it
    }
    std::vector<neuron_staged> parts = std::move(staged);
    staged.clear();
    std::sort(parts.begin(), parts.end(),
              [](const neuron_staged & a, const neuron_staged & b) { return a.offset < b.offset; });
    std::vector<uint8_t> run;
    for (auto first = parts.begin(), end = first; first != parts.end(); first = end) {
        run = first->data;
        for (end = first + 1; end != parts.end(); ++end) {
            const neuron_staged & last = *(end - 1);
            if (end->offset > last.offset + std::max(last.room, last.data.size())) {
                break;
            }
            run.resize(end->offset - first->offset);
            run.insert(run.end(), end->data.begin(), end->data.end());
        }
        const NRT_STATUS status = write_locked(run.data(), first->offset, run.size());
        if (status != NRT_SUCCESS) {
            return status;
        }
        std::for_each(first, end,
                      [this](const neuron_staged & s) { known.set(s.offset, s.data.data(), s.data.size()); });
    }
    return NRT_SUCCESS;
}

NRT_STATUS neuron_core::write_staged() {
    NRT_STATUS status = NRT_SUCCESS;
    for (const uint64_t id : ids_of_staged()) {
        const auto found = memories.find(id);  // it may be freed while the loop waits for another one
        if (status == NRT_SUCCESS && found != memories.end()) {
            status = found->second->write_staged();
        }
    }
    return status;
}

// locked
std::vector<uint64_t> neuron_core::ids_of_staged() const {
    std::vector<uint64_t> ids;
    for (const auto & [id, memory] : memories) {
        if (!memory->staged.empty()) {
            ids.push_back(id);
        }
    }
    return ids;
}

// Waits for launches until the host may write.
void neuron_memory::wait_to_write(size_t offset, size_t n) {
    const neuron_use use = { this, offset, n, true };
    core->launch_queue.wait_for_use(use);
    core->launch_queue.forget_poisoned(use);
    note_change(offset, n);
}

NRT_STATUS neuron_memory::write_locked(const void * data, size_t offset, size_t n) {
    const NRT_STATUS staged_status = write_staged();
    if (staged_status != NRT_SUCCESS) {
        return staged_status;
    }
    wait_to_write(offset, n);
    g_metrics.traffic.add_write(n);
    return checked(core->nrt.nrt_tensor_write(tensor, data, offset, n), "nrt_tensor_write", offset, n);
}

NRT_STATUS neuron_memory::read_locked(void * data, size_t offset, size_t n) {
    const NRT_STATUS staged_status = write_staged();
    if (staged_status != NRT_SUCCESS) {
        return staged_status;
    }
    const neuron_use use = { this, offset, n, false };
    core->launch_queue.wait_for_use(use);
    if (core->launch_queue.is_poisoned(use)) {
        failure = "core " + std::to_string(core->vnc) + ": " + std::to_string(n) + " bytes at offset " +
                  std::to_string(offset) + " were not computed: a launch failed";
        NEURON_ERROR("%s\n", failure.c_str());
        return NRT_EXEC_COMPLETED_WITH_ERR;
    }
    g_metrics.traffic.add_read(n);
    return checked(core->nrt.nrt_tensor_read(tensor, data, offset, n), "nrt_tensor_read", offset, n);
}

NRT_STATUS neuron_memory::set_locked(uint8_t value, size_t offset, size_t n) {
    const NRT_STATUS staged_status = write_staged();
    if (staged_status != NRT_SUCCESS) {
        return staged_status;
    }
    wait_to_write(offset, n);
    if (core->nrt.nrt_tensor_memset) {
        return checked(core->nrt.nrt_tensor_memset(tensor, offset, value, n), "nrt_tensor_memset", offset, n);
    }
    // for a library without memset: write a block repeatedly
    const std::vector<uint8_t> block(std::min<size_t>(n, 1 << 20), value);
    for (size_t done = 0; done < n; done += block.size()) {
        const NRT_STATUS status = write_locked(block.data(), offset + done, std::min(block.size(), n - done));
        if (status != NRT_SUCCESS) {
            return status;
        }
    }
    return NRT_SUCCESS;
}

std::string neuron_memory::write(const void * data, size_t offset, size_t n) {
    std::lock_guard<std::mutex> lock(core->mutex);
    if (write_locked(data, offset, n) != NRT_SUCCESS) {
        return failure;
    }
    if (keeps) {
        known.set(offset, data, n);
    }
    return "";
}

std::string neuron_memory::read(void * data, size_t offset, size_t n) {
    std::lock_guard<std::mutex> lock(core->mutex);
    return read_locked(data, offset, n) == NRT_SUCCESS ? "" : failure;
}

std::string neuron_memory::set(uint8_t value, size_t offset, size_t n) {
    std::lock_guard<std::mutex> lock(core->mutex);
    return set_locked(value, offset, n) == NRT_SUCCESS ? "" : failure;
}

// locked. Returns false when the library reports no statistics.
bool neuron_core::stats(nrt_vnc_memory_stats_t & stats) const {
    size_t size = 0;
    stats       = {};
    return nrt.nrt_get_vnc_memory_stats &&
           nrt.nrt_get_vnc_memory_stats((uint32_t) vnc, &stats, sizeof(stats), &size) == NRT_SUCCESS &&
           size >= sizeof(stats);
}

// locked. Sets `memory` to the smaller of what the library and the table of targets state. Physical cores that are not
// grouped share the HBM of a group, and the library may report all of it for each. Returns false when the library reports
// no statistics.
bool neuron_core::memory(nrt_vnc_memory_stats_t & memory) const {
    if (!stats(memory)) {
        return false;
    }
    const size_t share = neuron_core_memory(nrt.target, nrt.lnc);
    if (share && share < memory.bytes_limit) {
        const size_t own  = tensor_bytes + loaded_bytes + loaded_pages + (n_loaded ? microcode(nrt) : 0);
        const size_t free = std::min(memory.bytes_limit - std::min(memory.bytes_used, memory.bytes_limit),
                                     share - std::min(own, share));
        memory            = { share - free, share };
    }
    return true;
}

// locked. Returns bytes; 0 when the library reports none.
size_t neuron_core::used() const {
    nrt_vnc_memory_stats_t all;
    return stats(all) ? all.bytes_used : 0;
}

// locked. Measures a loaded model's memory; `before` bytes were used before loading it.
void neuron_core::note_size(neuron_model & model, size_t before) {
    const size_t after = used();
    if (model.measured || after <= before || !page) {
        return;
    }
    // The first program also loads the micro-code, and some programs add pages of the scratchpad. Neither belongs to
    // the program.
    const size_t once = n_loaded ? 0 : microcode(nrt);
    const size_t size = (after - before - std::min(after - before, once)) % page;
    model.measured    = true;
    measured_bytes += size;
    n_measured++;
    if (model.memory.bytes) {
        compared_bytes += size;
        stated_bytes += model.memory.bytes;
        NEURON_DEBUG("core %d: %s takes %zu KiB; its bundle estimates %zu KiB\n", vnc, model.name.c_str(), size >> 10,
                     model.memory.bytes >> 10);
        return;
    }
    NEURON_DEBUG("core %d: %s takes %zu KiB\n", vnc, model.name.c_str(), size >> 10);
}

// Returns the estimated size of a program that is not loaded and whose bundle states no size.
size_t neuron_core::program_size() const {
    const size_t n = n_measured;
    return n ? std::max(NEURON_PROGRAM_MEMORY, measured_bytes / n) : NEURON_PROGRAM_MEMORY;
}

size_t neuron_core::microcode(const neuron_nrt & nrt) {
    return std::max<size_t>(nrt.lnc, 1) * NEURON_MICROCODE_MEMORY;
}

// locked. Returns whether memory of this size may fit after all programs are unloaded: other tensors and the micro-code
// stay.
bool neuron_core::could_fit(size_t size) const {
    nrt_vnc_memory_stats_t all;
    if (!memory(all) || all.bytes_limit == 0) {
        return true;
    }
    const size_t kept = tensor_bytes + (n_loaded ? microcode(nrt) : 0);
    return kept <= all.bytes_limit && size <= all.bytes_limit - kept;
}

// locked. Returns a text with the uses of the core's memory, the missing amount for `needed`, and how the user can
// reduce the need; "" when the library reports no statistics. `at_least`: "at least " when more may be needed.
std::string neuron_core::occupancy(size_t needed, const char * at_least) const {
    nrt_vnc_memory_stats_t all;
    if (!memory(all) || all.bytes_limit == 0) {
        return "";
    }
    const auto mib = [](size_t bytes) {
        return std::to_string(bytes >> 20) + " MiB";
    };
    const size_t used = std::min<size_t>(all.bytes_used, all.bytes_limit);
    const size_t free = all.bytes_limit - used;
    const auto   lack = needed > free ? at_least + mib(needed - free + (1 << 20) - 1) + " are missing"
                        : *at_least   ? "it needs more than that"
                                      : "none of that size in one piece";
    return NEURON_NEXT_LINE "of the core's " + mib(all.bytes_limit) + ", tensors hold " + mib(tensor_bytes) +
           ", programs and others " + mib(used - std::min<size_t>(used, tensor_bytes)) + ", and " + mib(free) +
           " are free: " + lack +
           NEURON_NEXT_LINE
           "put fewer layers on the device (-ngl), or make the context (-c) or the batch (-ub) smaller";
}

neuron_memory * neuron_core::allocate_locked(size_t size, std::string & message, bool make_room) {
    nrt_tensor_t * tensor = nullptr;
    const auto     name   = "ggml" + std::to_string(next_memory_id);
    NRT_STATUS     status;
    do {
        status = nrt.nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, vnc, size, name.c_str(), &tensor);
    } while (status == NRT_RESOURCE && make_room && could_fit(size) && evict());
    if (status != NRT_SUCCESS) {
        message = nrt.describe("nrt_tensor_allocate", status) + ": " + std::to_string(size) + " bytes" +
                  (status == NRT_RESOURCE ? occupancy(size, "") : "");
        return nullptr;
    }
    tensor_bytes += size;
    auto memory    = std::make_unique<neuron_memory>();
    memory->core   = this;
    memory->tensor = tensor;
    memory->size   = size;
    memory->id     = next_memory_id++;
    nrt.users++;
    neuron_memory * result = memory.get();
    memories.emplace(result->id, std::move(memory));
    return result;
}

neuron_memory * neuron_core::allocate(size_t size) {
    if (!open()) {
        return nullptr;
    }
    std::lock_guard<std::mutex> lock(mutex);
    std::string                 message;
    neuron_memory *             memory = allocate_locked(size, message);
    if (!memory) {
        NEURON_ERROR("core %d: %s\n", vnc, message.c_str());
    }
    return memory;
}

neuron_memory * neuron_core::allocate_spare(size_t size, const neuron_programs & all) {
    size_t free  = 0;
    size_t total = 0;
    memory_stats(all, &free, &total);
    if (total && free < size + total / 16) {
        return nullptr;
    }
    std::string message;
    return allocate_locked(size, message, false);
}

void neuron_core::free_locked(neuron_memory * memory) {
    memory->staged.clear();
    launch_queue.wait_for_use({ memory, 0, memory->size, true });
    launch_queue.forget_poisoned({ memory, 0, memory->size, true });
    epoch++;  // also when no launch is bound to it: a plan may copy from it or to it
    destroy_bound_launches_of(memory->id);
    for (auto & slice : memory->slices) {
        nrt.nrt_tensor_free(&slice.second);
    }
    nrt.nrt_tensor_free(&memory->tensor);
    nrt.users--;
    tensor_bytes -= memory->size;
    said_full = false;
    memories.erase(memory->id);
}

void neuron_core::free(neuron_memory * memory) {
    std::lock_guard<std::mutex> lock(mutex);
    free_locked(memory);
}

neuron_memory * neuron_core::scratch(size_t size) {
    if (scratch_memory && scratch_memory->size >= size) {
        return scratch_memory;
    }
    size_t grown = MIN_SCRATCH;
    while (grown < size) {
        grown *= 2;
    }
    if (scratch_memory) {
        free_locked(scratch_memory);
        scratch_memory = nullptr;
    }
    std::string message;
    scratch_memory = allocate_locked(grown, message);
    if (!scratch_memory && grown > size) {
        scratch_memory = allocate_locked(size, message);
    }
    if (!scratch_memory) {
        NEURON_ERROR("core %d: no scratch memory: %s\n", vnc, message.c_str());
    }
    return scratch_memory;
}

void neuron_core::free_numbers() {
    for (neuron_memory * memory : numbers_memory) {
        free_locked(memory);
    }
    numbers_memory.clear();
    kept_numbers.clear();
}

neuron_operand neuron_core::numbers(const std::vector<float> & values, std::string & message) {
    const size_t          size = values.size() * sizeof(float);
    std::vector<uint32_t> bits(values.size());
    memcpy(bits.data(), values.data(), size);
    const auto known = kept_numbers.find(bits);
    if (known != kept_numbers.end()) {
        return known->second;
    }
    if (kept_numbers.size() >= MAX_NUMBERS) {
        free_numbers();  // plans with numbers are made again
    }
    const size_t room = GGML_PAD(size, NEURON_ALIGNMENT);
    if (numbers_memory.empty() || numbers_end + room > numbers_memory.back()->size) {
        neuron_memory * memory = allocate_locked(std::max(room, MIN_NUMBERS), message);
        if (!memory) {
            return {};
        }
        numbers_memory.push_back(memory);
        numbers_end = 0;
    }
    const neuron_operand where{ numbers_memory.back(), numbers_end, size };
    if (where.memory->write_locked(values.data(), where.offset, size) != NRT_SUCCESS) {
        message = where.memory->last_failure();
        return {};
    }
    numbers_end += room;
    return kept_numbers.emplace(std::move(bits), where).first->second;
}

// Source: AWS Neuron, "Neuron device memory", and the runtime's release notes (2.14 names the variables).
size_t neuron_scratchpad_page(const neuron_nrt & nrt) {
    for (const char * name : { "NEURON_SCRATCHPAD_PAGE_SIZE", "NEURON_RT_ONE_TMPBUF_PAGE_SIZE_MB" }) {
        const size_t mib = strtoull(neuron_variable(name).c_str(), nullptr, 10);
        if (mib) {
            return mib << 20;
        }
    }
    const nrt_version_t & v = nrt.version;
    return (size_t) (v.rt_major == 0 ? 0 : v.rt_major > 2 || v.rt_minor >= 33 ? 64 : 512) << 20;
}

// Returns the bytes of a scratchpad, in whole pages if their size is known.
size_t neuron_core::pages(size_t scratchpad) const {
    return page ? (scratchpad + page - 1) / page * page : scratchpad;
}

// locked. Sums the bundles' figures of the loaded programs.
void neuron_core::count_loaded() {
    size_t bytes = 0, unstated = 0, scratchpad = 0;
    for (const auto & entry : models) {
        const neuron_model & model = *entry.second;
        if (model.handle) {
            bytes += model.memory.bytes;
            unstated += model.memory.bytes == 0;
            scratchpad = std::max(scratchpad, model.memory.scratchpad);
        }
    }
    loaded_bytes    = bytes;
    loaded_unstated = unstated;
    loaded_pages    = pages(scratchpad);
}

// Returns the memory that programs will take that are not loaded yet, including the micro-code with the first one.
size_t neuron_core::missing_programs(const neuron_programs & all) const {
    const auto reserved = [&](size_t n) {
        return all.n > NEURON_RESERVED_PROGRAMS ? n / all.n * NEURON_RESERVED_PROGRAMS : n;
    };
    const auto rest = [](size_t n, size_t there) {
        return n - std::min(n, there);
    };
    const size_t compared = compared_bytes;
    const size_t stated   = stated_bytes;
    size_t       missing  = rest(reserved(all.memory.bytes), loaded_bytes);
    if (compared > stated) {
        missing = (size_t) ((double) missing * (double) compared / (double) stated);
    }
    missing += rest(std::min(all.n_unstated, NEURON_RESERVED_PROGRAMS), loaded_unstated) * program_size();
    const size_t once = n_loaded ? 0 : page;
    return missing + rest(std::max(pages(all.memory.scratchpad), once), loaded_pages) + (n_loaded ? 0 : microcode(nrt));
}

// locked. Returns the memory that a program will take that is not loaded yet.
size_t neuron_core::missing_for(const neuron_model & model) const {
    const size_t scratchpad = std::max(pages(model.memory.scratchpad), n_loaded ? 0 : page);
    return (model.memory.bytes ? model.memory.bytes : program_size()) + (n_loaded ? 0 : microcode(nrt)) + scratchpad -
           std::min<size_t>(scratchpad, loaded_pages);
}

void neuron_core::memory_stats(const neuron_programs & all_programs, size_t * free, size_t * total) {
    *free = *total = 0;
    nrt_vnc_memory_stats_t all;
    if (nrt.nrt_get_vnc_memory_stats && open() && memory(all)) {
        *total = all.bytes_limit;
        *free  = all.bytes_limit - std::min(all.bytes_used, all.bytes_limit);
        *free -= std::min(*free, missing_programs(all_programs));
    }
}

nrt_tensor_t * neuron_core::slice(neuron_memory & memory, size_t offset, size_t size, std::string & message) {
    nrt_tensor_t *& slice = memory.slices[{ offset, size }];
    if (!slice) {
        const NRT_STATUS status = nrt.nrt_tensor_allocate_slice(memory.tensor, offset, size, "slice", &slice);
        if (status != NRT_SUCCESS) {
            memory.slices.erase({ offset, size });
            message = nrt.describe("nrt_tensor_allocate_slice", status) + ": " + std::to_string(size) +
                      " bytes at offset " + std::to_string(offset) + " of " + std::to_string(memory.size);
            return nullptr;
        }
    }
    return slice;
}

NRT_STATUS neuron_core::copy(const neuron_operand & from, const neuron_operand & to) {
    for (neuron_memory * memory : { from.memory, to.memory }) {
        const NRT_STATUS status = memory->write_staged();
        if (status != NRT_SUCCESS) {
            return status;
        }
    }
    launch_queue.wait_for_use({ from.memory, from.offset, from.size, false });
    launch_queue.wait_for_use({ to.memory, to.offset, from.size, true });
    if (launch_queue.is_poisoned({ from.memory, from.offset, from.size, false })) {
        NEURON_ERROR("core %d: %zu bytes that are to be copied were not computed: a launch failed\n", vnc, from.size);
        return NRT_EXEC_COMPLETED_WITH_ERR;
    }
    to.memory->note_change(to.offset, from.size);
    if (nrt.nrt_tensor_copy) {
        launch_queue.forget_poisoned({ to.memory, to.offset, from.size, true });
        const NRT_STATUS status =
            nrt.nrt_tensor_copy(from.memory->tensor, from.offset, to.memory->tensor, to.offset, from.size);
        if (status != NRT_SUCCESS) {
            NEURON_ERROR("core %d: %s: %zu bytes\n", vnc, nrt.describe("nrt_tensor_copy", status).c_str(), from.size);
        }
        return status;
    }
    std::vector<uint8_t> data(from.size);
    const NRT_STATUS     status = from.memory->read_locked(data.data(), from.offset, from.size);
    return status != NRT_SUCCESS ? status : to.memory->write_locked(data.data(), to.offset, from.size);
}
