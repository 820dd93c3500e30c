// The models that are loaded on a NeuronCore.

#include "device/core.h"
#include "report/log.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <thread>

// The most sources and results of a NEFF: the most slots in a graph's key.
static constexpr size_t MAX_TENSORS = 1 << 16;

// Unloads the least recently used model; returns false when none is loaded.
bool neuron_core::evict() {
    neuron_model * oldest = nullptr;
    for (auto & entry : models) {
        neuron_model & model = *entry.second;
        if (model.handle && !model.collective && (!oldest || model.last_used < oldest->last_used)) {
            oldest = &model;
        }
    }
    if (!oldest) {
        return false;
    }
    uint64_t number;
    while (launch_queue.uses(oldest, number)) {
        launch_queue.wait_for(number);
    }
    if (!oldest->handle) {
        return true;  // another thread has unloaded it meanwhile
    }
    NEURON_DEBUG("core %d: unloading %s to make room\n", vnc, oldest->name.c_str());
    unload(*oldest);
    oldest->evicted = true;
    return true;
}

// This many reloads cause a message that programs take turns: occasional evictions cause fewer.
static constexpr size_t MANY_RELOADS = 32;

void neuron_core::note_reload() {
    if (++n_reloads == MANY_RELOADS) {
        NEURON_WARN("core %d: programs are loaded again and again (%zu times so far)\n"
                    "not all of them fit beside the tensors\n"
                    "put fewer layers on the device (-ngl), make -c or -ub smaller, or use kernels of layers "
                    "(kernelgen model --fuse layer)\n",
                    vnc, n_reloads);
    }
}

void neuron_core::preload(const std::vector<neuron_kernel> & kernels) {
    using clock = std::chrono::steady_clock;
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<neuron_model *> wanted;
    for (const neuron_kernel & kernel : kernels) {
        neuron_model & model = model_of(kernel);
        if (!model.handle && model.broken.empty() && !is_refused(model) &&
            std::find(wanted.begin(), wanted.end(), &model) == wanted.end()) {
            wanted.push_back(&model);
        }
    }
    const auto begun = clock::now();
    bool       said  = false;
    for (size_t i = 0; i < wanted.size(); i++) {
        const double seconds = std::chrono::duration<double>(clock::now() - begun).count();
        if (!said && seconds > 5 && (!nrt.simulator || neuron_log_enabled())) {
            NEURON_WARN("core %d: loading %zu programs; the first %zu took %.1f s\n", vnc, wanted.size(), i, seconds);
            said = true;
        }
        std::string message;
        if (load(*wanted[i], message, false) == NRT_RESOURCE) {
            break;
        }
    }
    if (!wanted.empty()) {
        NEURON_DEBUG("core %d: the programs of a graph were loaded before its first launch\n", vnc);
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
    count_loaded();
}

void neuron_core::mark_broken(neuron_model & model, const std::string & why) {
    model.broken = why;
    any_broken   = true;
    NEURON_ERROR("core %d: %s\n", vnc, why.c_str());
}

// Reads a model's NEFF from its bundle. A NEFF that differs from the bundle's index is never used.
bool neuron_core::read_neff(neuron_model & model, std::vector<uint8_t> & neff, std::string & message) {
    message = model.broken;
    if (!message.empty()) {
        return false;
    }
    const neuron_kernels * bundle = model.kernel.bundle->handle;
    size_t                 size   = 0;
    neuron_kernels_neff(bundle, model.kernel.number, &size);
    neff.resize(size);
    char why[NEURON_KERNELS_MESSAGE_SIZE];
    if (neuron_kernels_read(bundle, model.kernel.number, neff.data(), size, why, sizeof(why)) != NEURON_KERNELS_OK) {
        message = model.name + ": " + why;
        mark_broken(model, message);
        return false;
    }
    return true;
}

// locked
bool neuron_core::is_unusable(const neuron_model & model) const {
    return !model.broken.empty() || is_refused(model);
}

// locked
bool neuron_core::is_refused(const neuron_model & model) const {
    return !model.refused.empty() && tensor_bytes >= model.refused_beside;
}

// Reports that a program does not fit, once until memory is freed.
void neuron_core::note_refusal(const neuron_model & model) {
    const std::string & message = model.refused;
    if (said_full) {
        NEURON_LOG("core %d: %s\n", vnc, message.c_str());
        return;
    }
    said_full         = true;
    const size_t size = model.memory.bytes ? model.memory.bytes : program_size();
    NEURON_ERROR("core %d: %s; the CPU computes its ops until tensors are freed%s\n", vnc, message.c_str(),
                 occupancy(microcode(nrt) + size, "at least ").c_str());
}

// Loads a model, and unloads others for it if `make_room` is true. On failure sets `message`. Keeps permanent failures
// in model.broken, and failures that last until tensors are freed in model.refused.
NRT_STATUS neuron_core::load(neuron_model & model, std::string & message, bool make_room) {
    if (is_refused(model)) {
        message = model.refused;
        return NRT_RESOURCE;
    }
    model.refused.clear();
    if (model.handle) {
        return NRT_SUCCESS;
    }
    if (model.collective) {
        message = model.name + " has reductions inside, and is not loaded on all cores";
        return NRT_INVALID;
    }
    std::vector<uint8_t> neff;
    if (!read_neff(model, neff, message)) {
        return NRT_INVALID;
    }
    NRT_STATUS status;
    size_t     before = 0;
    bool       again  = true;  // NRT_FAILURE names no cause: the load is tried once more
    do {
        if (model.handle) {
            return NRT_SUCCESS;  // another thread has loaded it while this one waited for memory
        }
        before = used();
        status = nrt.nrt_load(neff.data(), neff.size(), vnc, -1, &model.handle);
        if (status == NRT_FAILURE && again) {
            again = false;
            NEURON_WARN("core %d: %s: %s; loading it once more\n", vnc, nrt.describe("nrt_load", status).c_str(),
                        model.name.c_str());
            status = nrt.nrt_load(neff.data(), neff.size(), vnc, -1, &model.handle);
        }
    } while (status == NRT_RESOURCE && make_room && evict());
    if (status != NRT_SUCCESS) {
        model.handle = nullptr;
        message      = nrt.describe("nrt_load", status) + ": " + model.name;
        switch (status) {
            case NRT_RESOURCE:
                if (make_room) {
                    message += " does not fit beside the tensors, though no other program is loaded";
                    model.refused        = message;
                    model.refused_beside = tensor_bytes;
                    note_refusal(model);
                }
                break;
            case NRT_FAILURE:
            case NRT_INVALID:
            case NRT_LOAD_NOT_ENOUGH_NC:
            case NRT_UNSUPPORTED_NEFF_VERSION:
                mark_broken(model, message);
                break;
            default:
                NEURON_ERROR("core %d: %s\n", vnc, message.c_str());
                break;
        }
        return status;
    }
    note_size(model, before);
    nrt.users++;
    n_loaded++;
    count_loaded();
    model.last_used = ++clock;
    if (model.evicted) {
        model.evicted = false;
        note_reload();
    }
    NEURON_DEBUG("core %d: loaded %s\n", vnc, model.name.c_str());
    if (model.tensors.empty()) {
        status = read_tensors(model, message);
        if (status != NRT_SUCCESS) {
            mark_broken(model, message);
            unload(model);
        }
    }
    return status;
}

bool neuron_core::prepare_collective(const neuron_kernel & kernel, std::vector<uint8_t> & neff) {
    const std::lock_guard<std::mutex> lock(mutex);
    neuron_model &                    model = model_of(kernel);
    std::string                       message;
    model.collective = true;
    neff.clear();
    if (model.handle) {
        return true;
    }
    if (!read_neff(model, neff, message)) {
        return false;
    }
    const size_t size = missing_for(model);
    do {
        model.used_before = used();
        nrt_vnc_memory_stats_t all;
        if (!stats(all) || all.bytes_limit == 0 ||
            all.bytes_limit - std::min(all.bytes_used, all.bytes_limit) >= size) {
            return true;
        }
    } while (evict());
    NEURON_ERROR("core %d: %s does not fit beside the tensors, though no other program is loaded%s\n", vnc,
                 model.name.c_str(), occupancy(size, "at least ").c_str());
    return false;
}

bool neuron_core::add_collective(const neuron_kernel & kernel, nrt_model_t * handle, uint32_t rank, uint32_t n_ranks) {
    const std::lock_guard<std::mutex> lock(mutex);
    neuron_model &                    model = model_of(kernel);
    std::string                       message;
    model.handle    = handle;
    model.last_used = ++clock;
    note_size(model, model.used_before);
    communicator = std::max<uint32_t>(communicator, n_ranks);
    n_loaded++;
    count_loaded();
    NEURON_DEBUG("core %d: loaded %s as rank %u of %u\n", vnc, model.name.c_str(), rank, n_ranks);
    if (model.tensors.empty() && read_tensors(model, message) != NRT_SUCCESS) {
        mark_broken(model, message);
        unload(model);
        return false;
    }
    return true;
}

namespace {

// A program that is being loaded on several cores. When one of them fails, libnrt lets the others wait forever: their
// threads share this object with the caller that gave up.
struct collective_load {
    struct rank {
        bool          done     = false;
        const char *  function = "nrt_load_collectives";  // the last one that was called
        NRT_STATUS    status   = NRT_SUCCESS;
        nrt_model_t * handle   = nullptr;
    };

    explicit collective_load(size_t n_ranks) : ranks(n_ranks) {}

    bool all_done() const {
        return std::all_of(ranks.begin(), ranks.end(), [](const rank & r) { return r.done; });
    }

    bool any_failed() const {
        return std::any_of(ranks.begin(), ranks.end(), [](const rank & r) { return r.status != NRT_SUCCESS; });
    }

    std::vector<uint8_t>    neff;
    std::mutex              mutex;  // guards `ranks`
    std::condition_variable changed;
    std::vector<rank>       ranks;
};

// Loads a program as one of several ranks. The first program of a core joins the communicator of all ranks.
void load_rank(const std::shared_ptr<collective_load> & load, const neuron_nrt & nrt, int vnc, uint32_t i, bool joins) {
    const auto            n_ranks = (uint32_t) load->ranks.size();
    collective_load::rank rank;
    if (joins && nrt.nrt_build_global_comm) {
        rank.function = "nrt_build_global_comm";
        rank.status   = nrt.nrt_build_global_comm(vnc, i, n_ranks);
    }
    if (rank.status == NRT_SUCCESS) {
        rank.function = "nrt_load_collectives";
        rank.status = nrt.nrt_load_collectives(load->neff.data(), load->neff.size(), vnc, -1, i, n_ranks, &rank.handle);
    }
    if (rank.status != NRT_SUCCESS) {
        rank.handle = nullptr;
        nrt.users--;
    }
    rank.done = true;
    const std::lock_guard<std::mutex> lock(load->mutex);
    load->ranks[i] = rank;
    load->changed.notify_all();
}

}  // namespace

// How long ranks may wait for each other: all of them, and the others after one has failed.
static constexpr auto LOAD_LIMIT   = std::chrono::minutes(10);
static constexpr auto FAILED_LIMIT = std::chrono::seconds(5);

bool neuron_load_on_all(const std::vector<neuron_core *> & cores, const neuron_kernel & kernel) {
    const neuron_nrt & nrt      = cores[0]->nrt;
    auto               load     = std::make_shared<collective_load>(cores.size());
    bool               is_ready = true;
    size_t             n_loaded = 0;
    bool               joins    = false;
    for (neuron_core * core : cores) {  // before any rank loads it and waits for others
        is_ready = core->prepare_collective(kernel, load->neff) && is_ready;
        n_loaded += load->neff.empty();
        joins = joins || core->communicator < cores.size();
    }
    if (!is_ready || n_loaded > 0) {
        return n_loaded == cores.size();
    }
    for (uint32_t i = 0; i < cores.size(); i++) {
        nrt.users++;
        std::thread(load_rank, load, std::cref(nrt), cores[i]->vnc, i, joins).detach();
    }
    std::vector<collective_load::rank> ranks;
    {
        std::unique_lock<std::mutex> lock(load->mutex);
        load->changed.wait_for(lock, LOAD_LIMIT, [&] { return load->all_done() || load->any_failed(); });
        load->changed.wait_for(lock, load->any_failed() ? FAILED_LIMIT : std::chrono::seconds(0),
                               [&] { return load->all_done(); });
        ranks = load->ranks;
    }
    const bool is_loaded = std::all_of(ranks.begin(), ranks.end(), [](const auto & r) { return r.handle != nullptr; });
    bool       is_usable = is_loaded;
    for (uint32_t i = 0; i < cores.size(); i++) {
        if (is_loaded) {
            is_usable = cores[i]->add_collective(kernel, ranks[i].handle, i, (uint32_t) cores.size()) && is_usable;
        } else if (ranks[i].handle) {
            nrt.nrt_unload(ranks[i].handle);
            nrt.users--;
        } else {
            const std::string why = ranks[i].done ? nrt.describe(ranks[i].function, ranks[i].status)
                                                  : std::string("nrt_load_collectives has not returned");
            NEURON_ERROR("core %d: %s: %s as rank %u of %zu\n", cores[i]->vnc, why.c_str(), kernel.id(), i,
                         cores.size());
        }
    }
    return is_usable;
}

// Reads an index below MAX_TENSORS from a name that begins with `prefix`, and sets `rest` to the text behind it.
// Returns false when there is none.
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

// Reads the names `input<i>` and `input<i>.must_alias_input`, `output<i>` and `input<i>.updated`. Outputs may have other
// names: users saw trn2 require `intermediate0_sg0000`.
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
        const bool                spare  = output && !result && !source;
        if (spare) {
            index = model.spare_bytes;
            model.spare_bytes += GGML_PAD(tensor.size, NEURON_ALIGNMENT);
        } else if (!result && !source) {
            message = model.name + ": its NEFF has an input '" + name + "', which no kernel of kernelgen has";
        }
        model.tensors.push_back({ name, result, index, output, tensor.size, spare });
    }
    nrt.nrt_free_model_tensor_info(info);
    if (!message.empty()) {
        model.tensors.clear();
        model.spare_bytes = 0;
        return NRT_INVALID;
    }
    if (model.spare_bytes) {
        NEURON_LOG("core %d: %s has outputs of its compiler's own: they get %zu bytes that nothing reads\n", vnc,
                   model.name.c_str(), model.spare_bytes);
    }
    return NRT_SUCCESS;
}

bool neuron_core::is_broken(const neuron_kernel & kernel) {
    if (!any_broken) {
        return false;  // does not wait for a computation to end
    }
    std::lock_guard<std::mutex> lock(mutex);
    return is_broken_locked(kernel);
}

bool neuron_core::is_broken_locked(const neuron_kernel & kernel) const {
    const auto found = models.find(kernel.neff_number());
    return found != models.end() && !found->second->broken.empty();
}

bool neuron_core::is_unusable(const neuron_kernel & kernel) const {
    const auto found = models.find(kernel.neff_number());
    return found != models.end() && is_unusable(*found->second);
}

// Returns the kernel's model.
neuron_model & neuron_core::model_of(const neuron_kernel & kernel) {
    std::unique_ptr<neuron_model> & model = models[kernel.neff_number()];
    if (!model) {
        model         = std::make_unique<neuron_model>();
        model->kernel = kernel;
        model->memory = kernel.memory();
        model->name   = std::string(kernel.id()) + " of " + kernel.bundle->origin;
    }
    return *model;
}
