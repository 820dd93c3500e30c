#include "core.h"

#include "log.h"

#include <algorithm>
#include <chrono>
#include <cstring>

// Steps bound at once. Each has two tensor sets in the library; a graph of a large model has about a thousand.
static constexpr size_t MAX_STEPS = 1 << 16;

// Sources and results of a NEFF: as many as a graph's key has slots.
static constexpr size_t MAX_TENSORS = 1 << 16;

// The smallest scratch memory; it grows by doubling.
static constexpr size_t MIN_SCRATCH = 1 << 20;

neuron_core::neuron_core(const neuron_nrt & nrt, int vnc) : nrt(nrt), vnc(vnc), flights(nrt, vnc, mutex) {}

bool neuron_core::open() {
    const std::string & failure = nrt.init();
    if (!failure.empty()) {
        NEURON_ERROR("core %d: %s\n", vnc, failure.c_str());
    }
    return failure.empty();
}

void neuron_core::release() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        flights.wait_for_all();
    }
    flights.stop();
    std::lock_guard<std::mutex> lock(mutex);
    if (flights.is_queue() && flights.queued()) {
        NEURON_LOG("core %d: %llu launches, %llu of them while another one was in flight\n", vnc,
                   (unsigned long long) flights.queued(), (unsigned long long) flights.overlapping());
    }
    if (flights.jobs_done()) {
        NEURON_LOG("core %d: %llu jobs waited for another core\n", vnc, (unsigned long long) flights.jobs_done());
    }
    destroy_steps([](const std::vector<uint64_t> &) { return true; });
    for (auto & entry : models) {
        if (entry.second->handle) {
            unload(*entry.second);
        }
    }
    if (scratch_memory) {
        free_locked(scratch_memory);
        scratch_memory = nullptr;
    }
}

//
// memory
//

// Passes a status on, and reports and keeps what failed.
NRT_STATUS neuron_memory::checked(NRT_STATUS status, const char * function, size_t offset, size_t n) {
    if (status != NRT_SUCCESS) {
        failure = "core " + std::to_string(core->vnc) + ": " + core->nrt.describe(function, status) + ": " +
                  std::to_string(n) + " bytes at offset " + std::to_string(offset) + " of " + std::to_string(size);
        NEURON_ERROR("%s\n", failure.c_str());
    }
    return status;
}

// Waits for launches, after which the host may write.
void neuron_memory::wait_to_write(size_t offset, size_t n, uint64_t before) {
    const neuron_use use = { this, offset, n, true };
    core->flights.wait_for_use(use, before);
    core->flights.forget_lost(use);
    version++;
}

NRT_STATUS neuron_memory::write_locked(const void * data, size_t offset, size_t n, uint64_t before) {
    wait_to_write(offset, n, before);
    return checked(core->nrt.nrt_tensor_write(tensor, data, offset, n), "nrt_tensor_write", offset, n);
}

NRT_STATUS neuron_memory::read_locked(void * data, size_t offset, size_t n, uint64_t before) {
    const neuron_use use = { this, offset, n, false };
    core->flights.wait_for_use(use, before);
    if (core->flights.is_lost(use)) {
        failure = "core " + std::to_string(core->vnc) + ": " + std::to_string(n) + " bytes at offset " +
                  std::to_string(offset) + " were not computed: a launch failed";
        NEURON_ERROR("%s\n", failure.c_str());
        return NRT_EXEC_COMPLETED_WITH_ERR;
    }
    return checked(core->nrt.nrt_tensor_read(tensor, data, offset, n), "nrt_tensor_read", offset, n);
}

NRT_STATUS neuron_memory::set_locked(uint8_t value, size_t offset, size_t n) {
    wait_to_write(offset, n, NEURON_LAST);
    if (core->nrt.nrt_tensor_memset) {
        return checked(core->nrt.nrt_tensor_memset(tensor, offset, value, n), "nrt_tensor_memset", offset, n);
    }
    // a library that has no memset: write a block repeatedly
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
    return write_locked(data, offset, n) == NRT_SUCCESS ? "" : failure;
}

std::string neuron_memory::read(void * data, size_t offset, size_t n) {
    std::lock_guard<std::mutex> lock(core->mutex);
    return read_locked(data, offset, n) == NRT_SUCCESS ? "" : failure;
}

std::string neuron_memory::set(uint8_t value, size_t offset, size_t n) {
    std::lock_guard<std::mutex> lock(core->mutex);
    return set_locked(value, offset, n) == NRT_SUCCESS ? "" : failure;
}

neuron_memory * neuron_core::allocate_locked(size_t size, std::string & message, bool make_room) {
    nrt_tensor_t * tensor = nullptr;
    const auto     name   = "ggml" + std::to_string(next_memory_id);
    NRT_STATUS     status;
    do {
        status = nrt.nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, vnc, size, name.c_str(), &tensor);
    } while (status == NRT_RESOURCE && make_room && evict());
    if (status != NRT_SUCCESS) {
        message = nrt.describe("nrt_tensor_allocate", status) + ": " + std::to_string(size) + " bytes";
        return nullptr;
    }
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

neuron_memory * neuron_core::allocate_spare(size_t size, size_t n_programs) {
    size_t free  = 0;
    size_t total = 0;
    memory_stats(n_programs, &free, &total);
    if (total && free < size + total / 16) {
        return nullptr;
    }
    std::string message;
    return allocate_locked(size, message, false);
}

void neuron_core::free_locked(neuron_memory * memory) {
    flights.wait_for_use({ memory, 0, memory->size, true });
    flights.forget_lost({ memory, 0, memory->size, true });
    epoch++;  // also when no step is bound to it: a plan may copy from it or to it
    // a step's key holds the id of every memory that it is bound to: see step_key
    const uint64_t id = memory->id;
    destroy_steps([id](const std::vector<uint64_t> & key) {
        for (size_t i = 2; i < key.size(); i += 3) {
            if (key[i] == id) {
                return true;
            }
        }
        return false;
    });
    for (auto & slice : memory->slices) {
        nrt.nrt_tensor_free(&slice.second);
    }
    nrt.nrt_tensor_free(&memory->tensor);
    nrt.users--;
    memories.erase(id);
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

void neuron_core::memory_stats(size_t n_programs, size_t * free, size_t * total) {
    *free = *total = 0;
    if (!nrt.nrt_get_vnc_memory_stats || !open()) {
        return;
    }
    nrt_vnc_memory_stats_t stats{};
    size_t                 size = 0;
    if (nrt.nrt_get_vnc_memory_stats((uint32_t) vnc, &stats, sizeof(stats), &size) == NRT_SUCCESS &&
        size >= sizeof(stats)) {
        *total = stats.bytes_limit;
        *free  = stats.bytes_limit - std::min(stats.bytes_used, stats.bytes_limit);

        const size_t loaded   = n_loaded;
        const size_t wanted   = std::min(n_programs, NEURON_RESERVED_PROGRAMS);
        const size_t missing  = wanted - std::min(loaded, wanted);
        const size_t reserved = missing * NEURON_PROGRAM_MEMORY + (loaded ? 0 : NEURON_MICROCODE_MEMORY);
        *free -= std::min(*free, reserved);
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

NRT_STATUS neuron_core::copy(const neuron_operand & from, const neuron_operand & to, uint64_t before) {
    flights.wait_for_use({ from.memory, from.offset, from.size, false }, before);
    flights.wait_for_use({ to.memory, to.offset, from.size, true }, before);
    if (flights.is_lost({ from.memory, from.offset, from.size, false })) {
        NEURON_ERROR("core %d: %zu bytes that are to be copied were not computed: a launch failed\n", vnc, from.size);
        return NRT_EXEC_COMPLETED_WITH_ERR;
    }
    to.memory->version++;
    if (nrt.nrt_tensor_copy) {
        flights.forget_lost({ to.memory, to.offset, from.size, true });
        const NRT_STATUS status =
            nrt.nrt_tensor_copy(from.memory->tensor, from.offset, to.memory->tensor, to.offset, from.size);
        if (status != NRT_SUCCESS) {
            NEURON_ERROR("core %d: %s: %zu bytes\n", vnc, nrt.describe("nrt_tensor_copy", status).c_str(), from.size);
        }
        return status;
    }
    std::vector<uint8_t> data(from.size);
    const NRT_STATUS     status = from.memory->read_locked(data.data(), from.offset, from.size, before);
    return status != NRT_SUCCESS ? status : to.memory->write_locked(data.data(), to.offset, from.size, before);
}

//
// launches
//

// Returns NRT_QUEUE_FULL when it let go of the mutex: then it is to be tried again.
NRT_STATUS neuron_core::try_launch(neuron_step &       step,
                                   neuron_stream &     stream,
                                   uint64_t            graph,
                                   uint64_t            number,
                                   const std::string & node) {
    if (flights.is_full()) {
        flights.wait_for_first();
        return NRT_QUEUE_FULL;
    }
    if (stream.failed != NRT_SUCCESS) {
        return stream.failed;
    }
    if (!step.model->handle) {
        std::string      message;
        const NRT_STATUS status = load(*step.model, message);
        return status == NRT_SUCCESS ? NRT_QUEUE_FULL : status;  // to load may have let go of the mutex
    }
    step.model->last_used   = ++clock;
    const NRT_STATUS status = flights.launch(step, stream, graph, number, node);
    if (status == NRT_QUEUE_FULL) {
        flights.wait_for_queue();
    }
    return status;
}

NRT_STATUS neuron_core::execute(neuron_step & step, neuron_stream & stream, const char * node) {
    const auto launch = [this, &step, &stream, graph = stream.graph, node = std::string(node)](uint64_t number) {
        return try_launch(step, stream, graph, number, node);
    };
    NRT_STATUS status = NRT_QUEUE_FULL;
    while (status == NRT_QUEUE_FULL && !flights.must_queue(step.uses)) {
        status = launch(NEURON_LAST);
    }
    if (status != NRT_QUEUE_FULL) {
        return status;
    }
    flights.queue(stream, step.uses, [launch](uint64_t number) {
        NRT_STATUS status = NRT_QUEUE_FULL;
        while (status == NRT_QUEUE_FULL) {
            status = launch(number);
        }
        return status;
    });
    return NRT_SUCCESS;
}

NRT_STATUS neuron_core::in_order(neuron_stream & stream, std::vector<neuron_use> uses, const neuron_work & work) {
    if (!flights.must_queue(uses)) {
        return work(NEURON_LAST);
    }
    flights.queue(stream, std::move(uses), work);
    return NRT_SUCCESS;
}

NRT_STATUS neuron_core::write(neuron_stream & stream, const neuron_operand & to, const void * data) {
    const neuron_use use = { to.memory, to.offset, to.size, true };
    if (!flights.must_queue({ use })) {
        return to.memory->write_locked(data, to.offset, to.size);
    }
    flights.queue(stream, { use },
                  [to, kept = std::vector<uint8_t>((const uint8_t *) data, (const uint8_t *) data + to.size)](
                      uint64_t number) { return to.memory->write_locked(kept.data(), to.offset, to.size, number); });
    return NRT_SUCCESS;
}

NRT_STATUS neuron_core::copy(neuron_stream & stream, const neuron_operand & from, const neuron_operand & to) {
    return in_order(stream,
                    {
                        { from.memory, from.offset, from.size, false },
                        { to.memory,   to.offset,   from.size, true  }
    },
                    [this, from, to](uint64_t number) { return copy(from, to, number); });
}

void neuron_core::wait_for(neuron_stream & stream, neuron_core & other, uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex);
    flights.queue(stream, {}, [this, &other, number](uint64_t) {
        const neuron_unlocked             unlocked(mutex);
        const std::lock_guard<std::mutex> lock(other.mutex);
        other.flights.wait_for(number);
        return NRT_SUCCESS;
    });
}

void neuron_core::copy_from(neuron_stream & stream, const neuron_operand & from, const neuron_operand & to) {
    neuron_core &          other = *from.memory->core;
    const std::scoped_lock both(mutex, other.mutex);
    const uint64_t         held = other.flights.hold({ from.memory, from.offset, from.size, false });
    flights.queue(stream,
                  {
                      { to.memory, to.offset, from.size, true }
    },
                  [this, &other, from, to, held](uint64_t number) {
                      std::vector<uint8_t> data(from.size);
                      NRT_STATUS           status;
                      {
                          const neuron_unlocked             unlocked(mutex);
                          const std::lock_guard<std::mutex> lock(other.mutex);
                          status = from.memory->read_locked(data.data(), from.offset, from.size, held);
                          other.flights.release(held);
                      }
                      return status != NRT_SUCCESS ? status
                                                   : to.memory->write_locked(data.data(), to.offset, from.size, number);
                  });
}

NRT_STATUS neuron_core::finish(neuron_stream & stream) {
    flights.wait_for(stream);
    const NRT_STATUS status = stream.failed;
    stream.failed           = NRT_SUCCESS;
    flights.forget_lost(stream);
    return status;
}

//
// models
//

// Unloads the model that was not used for longest; returns false when none is loaded.
bool neuron_core::evict() {
    neuron_model * oldest = nullptr;
    for (auto & entry : models) {
        neuron_model & model = *entry.second;
        if (model.handle && (!oldest || model.last_used < oldest->last_used)) {
            oldest = &model;
        }
    }
    if (!oldest) {
        return false;
    }
    uint64_t number;
    while (flights.uses(oldest, number)) {
        flights.wait_for(number);
    }
    if (!oldest->handle) {
        return true;  // another thread has unloaded it meanwhile
    }
    NEURON_LOG("core %d: unloading %s to make room\n", vnc, oldest->name.c_str());
    unload(*oldest);
    oldest->evicted = true;
    return true;
}

// Reloads after which it is said that programs take turns: what is unloaded by chance when memory runs short is less.
static constexpr size_t MANY_RELOADS = 32;

void neuron_core::note_reload() {
    if (++n_reloads == MANY_RELOADS) {
        NEURON_WARN("core %d: programs are loaded again and again (%zu times so far), since not all of them fit beside "
                    "the tensors: "
                    "put fewer layers on the device (-ngl), make the context (-c) or the batch (-ub) smaller, or use "
                    "kernels of whole "
                    "layers (kernelgen model --fuse=layer), which are fewer\n",
                    vnc, n_reloads);
    }
}

void neuron_core::preload(const std::vector<neuron_kernel> & kernels) {
    using clock = std::chrono::steady_clock;
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<neuron_model *> wanted;
    for (const neuron_kernel & kernel : kernels) {
        neuron_model & model = model_of(kernel);
        if (!model.handle && model.broken.empty() && std::find(wanted.begin(), wanted.end(), &model) == wanted.end()) {
            wanted.push_back(&model);
        }
    }
    const auto begun = clock::now();
    bool       said  = false;
    for (size_t i = 0; i < wanted.size(); i++) {
        const double seconds = std::chrono::duration<double>(clock::now() - begun).count();
        if (!said && seconds > 5 && (!nrt.simulator || neuron_log_enabled())) {
            NEURON_WARN("core %d: loading %zu programs, of which %zu took %.1f s\n", vnc, wanted.size(), i, seconds);
            said = true;
        }
        std::string message;
        if (load(*wanted[i], message, false) == NRT_RESOURCE) {
            break;
        }
    }
    if (!wanted.empty()) {
        NEURON_LOG("core %d: programs of a graph were loaded before it is computed\n", vnc);
    }
}

void neuron_core::unload(neuron_model & model) {
    const NRT_STATUS status = nrt.nrt_unload(model.handle);
    if (status != NRT_SUCCESS) {
        NEURON_WARN("core %d: %s: %s\n", vnc, nrt.describe("nrt_unload", status).c_str(), model.name.c_str());
    }
    model.handle = nullptr;
    nrt.users--;
    n_loaded--;
}

void neuron_core::mark_broken(neuron_model & model, const std::string & why) {
    model.broken = why;
    any_broken   = true;
    NEURON_ERROR("core %d: %s\n", vnc, why.c_str());
}

// Loads a model, for which others are unloaded if they may be, and sets `message` when that fails. What can't get better by itself is kept in model.broken.
NRT_STATUS neuron_core::load(neuron_model & model, std::string & message, bool make_room) {
    NRT_STATUS status;
    do {
        if (model.handle) {
            return NRT_SUCCESS;  // another thread has loaded it while memory was waited for
        }
        status = nrt.nrt_load(model.neff, model.neff_size, vnc, -1, &model.handle);
    } while (status == NRT_RESOURCE && make_room && evict());
    if (status != NRT_SUCCESS) {
        model.handle = nullptr;
        message      = nrt.describe("nrt_load", status) + ": " + model.name;
        switch (status) {
            case NRT_FAILURE:
            case NRT_INVALID:
            case NRT_LOAD_NOT_ENOUGH_NC:
            case NRT_UNSUPPORTED_NEFF_VERSION:
                mark_broken(model, message);
                break;
            default:
                if (make_room || status != NRT_RESOURCE) {
                    NEURON_ERROR("core %d: %s\n", vnc, message.c_str());
                }
                break;
        }
        return status;
    }
    nrt.users++;
    n_loaded++;
    model.last_used = ++clock;
    if (model.evicted) {
        model.evicted = false;
        note_reload();
    }
    NEURON_LOG("core %d: loaded %s\n", vnc, model.name.c_str());
    if (model.tensors.empty()) {
        status = read_tensors(model, message);
        if (status != NRT_SUCCESS) {
            mark_broken(model, message);
            unload(model);
        }
    }
    return status;
}

// Reads an index below MAX_TENSORS from a name that begins with `prefix`, and leaves what follows it; false when there is none.
static bool read_index(const std::string & name, const char * prefix, size_t & index, std::string & rest) {
    const size_t n = strlen(prefix);
    if (name.compare(0, n, prefix) != 0 || name.size() == n || name[n] < '0' || name[n] > '9') {
        return false;
    }
    index      = 0;
    size_t end = n;
    for (; end < name.size() && name[end] >= '0' && name[end] <= '9' && index < MAX_TENSORS; end++) {
        index = 10 * index + (size_t) (name[end] - '0');
    }
    rest = name.substr(end);
    return index < MAX_TENSORS;
}

// Reads the names `input<i>` and `input<i>.must_alias_input`, `output<i>` and `input<i>.updated`.
NRT_STATUS neuron_core::read_tensors(neuron_model & model, std::string & message) {
    nrt_tensor_info_array_t * info   = nullptr;
    const NRT_STATUS          status = nrt.nrt_get_model_tensor_info(model.handle, &info);
    if (status != NRT_SUCCESS) {
        message = nrt.describe("nrt_get_model_tensor_info", status) + ": " + model.name;
        return status;
    }
    for (uint64_t i = 0; i < info->tensor_count && message.empty(); i++) {
        const nrt_tensor_info_t & tensor = info->tensor_array[i];
        const std::string         name(tensor.name, strnlen(tensor.name, sizeof(tensor.name)));
        const bool                output = tensor.usage == NRT_TENSOR_USAGE_OUTPUT;
        size_t                    index  = 0;
        std::string               rest;
        const bool                result = output && read_index(name, "output", index, rest) && rest.empty();
        const bool                source = !result && read_index(name, "input", index, rest) &&
                                           (output ? rest == ".updated" : rest.empty() || rest == ".must_alias_input");
        if (!result && !source) {
            message = model.name + ": its NEFF has a tensor '" + name + "', which no kernel of kernelgen has";
        }
        model.tensors.push_back({ name, result, index, output, tensor.size });
    }
    nrt.nrt_free_model_tensor_info(info);
    if (!message.empty()) {
        model.tensors.clear();
        return NRT_INVALID;
    }
    return NRT_SUCCESS;
}

bool neuron_core::is_broken(const neuron_kernel & kernel) {
    if (!any_broken) {
        return false;  // without waiting for a computation to end
    }
    std::lock_guard<std::mutex> lock(mutex);
    return is_broken_locked(kernel);
}

bool neuron_core::is_broken_locked(const neuron_kernel & kernel) const {
    const auto found = models.find(kernel.neff_number());
    return found != models.end() && !found->second->broken.empty();
}

//
// steps
//

void neuron_core::destroy(neuron_step & step) {
    if (step.input) {
        nrt.nrt_destroy_tensor_set(&step.input);
    }
    if (step.output) {
        nrt.nrt_destroy_tensor_set(&step.output);
    }
}

template <typename F> void neuron_core::destroy_steps(F which) {
    bool any = false;
    for (auto it = steps.begin(); it != steps.end();) {
        if (which(it->first)) {
            destroy(*it->second);
            it  = steps.erase(it);
            any = true;
        } else {
            ++it;
        }
    }
    epoch += any;
}

void neuron_core::destroy_steps_and_slices() {
    flights.wait_for_all();
    destroy_steps([](const std::vector<uint64_t> &) { return true; });
    for (auto & entry : memories) {
        for (auto & slice : entry.second->slices) {
            nrt.nrt_tensor_free(&slice.second);
        }
        entry.second->slices.clear();
    }
}

// Returns what a step is known by: the NEFF, the numbers of sources and results, and of each operand memory, offset and size.
// The NEFF stands for the kernel, since equal NEFFs compute the same.
static std::vector<uint64_t> step_key(const neuron_kernel & kernel, const neuron_binding & binding) {
    std::vector<uint64_t> key;
    key.reserve(2 + 3 * binding.size());
    key.push_back(kernel.neff_number());
    key.push_back(binding.n_src | (uint64_t) binding.n_results << 32);
    for (size_t i = 0; i < binding.size(); i++) {
        const neuron_operand & operand = binding.operands[i];
        key.push_back(operand.memory ? operand.memory->id : 0);
        key.push_back(operand.offset);
        key.push_back(operand.size);
    }
    return key;
}

// Returns the index of the operand that a model's tensor is, or that of none.
static size_t operand_of(const neuron_model::tensor & tensor, const neuron_binding & binding) {
    const size_t n = tensor.result ? binding.n_results : binding.n_src;
    return tensor.index < n ? tensor.index + (tensor.result ? binding.n_src : 0) : binding.size();
}

// Returns in what a NEFF disagrees with the bundle's index; "" when each of its tensors is an operand of that size, and each result
// and each source that the kernel changes is one of its outputs. It may lack inputs: a compiler leaves out what no result depends on.
static std::string disagreement(const neuron_model & model, const neuron_binding & binding) {
    const std::string text = model.name + ": its NEFF disagrees with the bundle's index: ";

    std::vector<std::string> outputs;
    for (size_t i = 0; i < binding.n_results; i++) {
        outputs.push_back("output" + std::to_string(i));
    }
    for (size_t i = 0; i < binding.n_src; i++) {
        if (binding.is_updated(i)) {
            outputs.push_back("input" + std::to_string(i) + ".updated");
        }
    }
    for (const neuron_model::tensor & tensor : model.tensors) {
        const size_t i          = operand_of(tensor, binding);
        const bool   is_operand = i < binding.size() && (tensor.result || !tensor.output || binding.is_updated(i));
        const size_t size       = is_operand ? binding.operands[i].size : 0;
        if (size != tensor.size) {
            return text + tensor.name + " has " + std::to_string(tensor.size) + " bytes and the index says " +
                   std::to_string(size);
        }
        const auto found = std::find(outputs.begin(), outputs.end(), tensor.name);
        if (tensor.output && found != outputs.end()) {
            outputs.erase(found);
        }
    }
    return outputs.empty() ? "" : text + "it lacks " + outputs.front();
}

// Returns the kernel's model, whose NEFF is compared with its bundle's index when it is asked for first.
neuron_model & neuron_core::model_of(const neuron_kernel & kernel) {
    std::unique_ptr<neuron_model> & model = models[kernel.neff_number()];
    if (!model) {
        model       = std::make_unique<neuron_model>();
        model->neff = neuron_kernels_neff(kernel.bundle->handle, kernel.number, &model->neff_size);
        model->name = std::string(kernel.id()) + " of " + kernel.bundle->origin;
        char message[NEURON_KERNELS_MESSAGE_SIZE];
        if (neuron_kernels_verify(kernel.bundle->handle, kernel.number, message, sizeof(message)) !=
            NEURON_KERNELS_OK) {
            mark_broken(*model, model->name + ": " + message);
        }
    }
    return *model;
}

// Returns what a kernel uses that is bound: sources that its NEFF lacks among them, since the step goes with their memory.
static std::vector<neuron_use> uses_of(const neuron_binding & binding) {
    std::vector<neuron_use> uses;
    for (size_t i = 0; i < binding.size(); i++) {
        const neuron_operand & o = binding.operands[i];
        if (!o.memory) {
            continue;
        }
        if (i < binding.n_src) {
            uses.push_back({ o.memory, o.offset, o.size, false });
        }
        if (i >= binding.n_src || binding.is_updated(i)) {
            uses.push_back({ o.memory, o.offset, o.size, true });
        }
    }
    return uses;
}

// Makes the tensor sets of a step. Returns false and sets `message` when that fails: what was made is the step's.
bool neuron_core::fill(neuron_step & step, const neuron_binding & binding, std::string & message) {
    const auto failed = [&](const char * function, NRT_STATUS status) {
        message = nrt.describe(function, status) + ": " + step.model->name;
        return false;
    };
    for (nrt_tensor_set_t ** set : { &step.input, &step.output }) {
        const NRT_STATUS status = nrt.nrt_allocate_tensor_set(set);
        if (status != NRT_SUCCESS) {
            return failed("nrt_allocate_tensor_set", status);
        }
    }
    for (const neuron_model::tensor & tensor : step.model->tensors) {
        const neuron_operand & operand = binding.operands[operand_of(tensor, binding)];
        nrt_tensor_t *         bound   = slice(*operand.memory, operand.offset, operand.size, message);
        if (!bound) {
            return false;
        }
        const NRT_STATUS status =
            nrt.nrt_add_tensor_to_tensor_set(tensor.output ? step.output : step.input, tensor.name.c_str(), bound);
        if (status != NRT_SUCCESS) {
            return failed("nrt_add_tensor_to_tensor_set", status);
        }
    }
    return true;
}

// Loads the model if need be and makes a step of it, or returns NULL and sets `message`.
std::unique_ptr<neuron_step> neuron_core::make_step(neuron_model &         model,
                                                    const neuron_binding & binding,
                                                    std::string &          message) {
    if (!model.handle && load(model, message) != NRT_SUCCESS) {
        return nullptr;
    }
    message = disagreement(model, binding);
    if (!message.empty()) {
        mark_broken(model, message);
        return nullptr;
    }
    auto step   = std::make_unique<neuron_step>();
    step->model = &model;
    step->uses  = uses_of(binding);
    if (!fill(*step, binding, message)) {
        destroy(*step);
        return nullptr;
    }
    return step;
}

neuron_step * neuron_core::bind(const neuron_kernel &  kernel,
                                const neuron_binding & binding,
                                std::string &          message,
                                bool &                 broken) {
    std::vector<uint64_t> key   = step_key(kernel, binding);
    const auto            found = steps.find(key);
    if (found != steps.end()) {
        return found->second.get();
    }
    if (steps.size() >= MAX_STEPS) {
        destroy_steps_and_slices();
    }
    neuron_model & model = model_of(kernel);
    message              = model.broken;
    auto step            = message.empty() ? make_step(model, binding, message) : nullptr;
    broken               = !model.broken.empty();
    return step ? steps.emplace(std::move(key), std::move(step)).first->second.get() : nullptr;
}
