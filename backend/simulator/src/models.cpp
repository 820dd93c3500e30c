// Loads models (nrt_load) and answers queries about them.

#include "models.h"

#include "../../nrt/nrt_api.h"
#include "arena.h"
#include "config.h"
#include "faults.h"
#include "helper.h"
#include "log.h"
#include "neff.h"
#include "protocol.h"
#include "runtime.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace simulator {

// The cause of a failed start rarely disappears within a moment, and a client may request hundreds of kernels.
constexpr std::chrono::seconds START_AGAIN_AFTER{ 5 };

std::shared_ptr<simulator::helper> get_helper(runtime & rt, const char * where) {
    const std::lock_guard<std::mutex> lock(rt.helper_mutex);
    if (rt.helper == nullptr || rt.helper->broken()) {
        rt.helper = nullptr;
        if (std::chrono::steady_clock::now() < rt.not_before) {
            log(level::debug, where, "the helper did not start a moment ago, and is not started again yet");
            return nullptr;
        }
        std::string error;
        rt.helper = simulator::helper::start(rt.arenas, error);
        if (rt.helper == nullptr) {
            log(level::error, where, "%s", error.c_str());
            rt.not_before = std::chrono::steady_clock::now() + START_AGAIN_AFTER;
        }
    }
    return rt.helper;
}

template <typename T> bool take(const std::vector<uint8_t> & message, size_t & at, T & out) {
    if (message.size() - at < sizeof(out)) {
        return false;
    }
    memcpy(&out, message.data() + at, sizeof(out));
    at += sizeof(out);
    return true;
}

// Reads the answer to LOAD.
static bool read_tensors(const std::vector<uint8_t> &  message,
                         simulator::protocol::loaded & loaded,
                         std::vector<tensor_info> &    out) {
    size_t                      at = 0;
    simulator::protocol::answer answer;
    if (!take(message, at, answer) || !take(message, at, loaded)) {
        return false;
    }
    for (uint32_t i = 0; i < answer.tensors; i++) {
        simulator::protocol::tensor from;
        if (!take(message, at, from)) {
            return false;
        }
        tensor_info info;
        info.usage = static_cast<nrt_tensor_usage_t>(from.usage);
        info.dtype = static_cast<nrt_dtype_t>(from.dtype);
        info.size  = from.size;
        info.alias = from.alias;
        for (uint32_t d = 0; d < from.ndim; d++) {
            uint32_t n;
            if (!take(message, at, n)) {
                return false;
            }
            info.shape.push_back(n);
        }
        const bool alias = from.alias < static_cast<int32_t>(i) && from.alias >= -1;
        if (!alias || message.size() - at < from.name || from.name >= NRT_TENSOR_NAME_MAX) {
            return false;
        }
        info.name.assign(reinterpret_cast<const char *>(message.data()) + at, from.name);
        at += from.name;
        out.push_back(std::move(info));
    }
    return true;
}

NRT_STATUS answered(const std::vector<uint8_t> & message, const char * where) {
    simulator::protocol::answer answer;
    memcpy(&answer, message.data(), sizeof(answer));  // helper::call has checked the size
    const auto status = static_cast<NRT_STATUS>(answer.status);
    if (status != NRT_SUCCESS) {
        const std::string reason(message.begin() + sizeof(answer), message.end());
        log(level::error, where, "%s", reason.c_str());
    }
    return status;
}

NRT_STATUS unanswered(outcome result, simulator::helper & helper, double timeout, const char * where) {
    if (result == outcome::refused) {
        return NRT_RESOURCE;
    }
    if (result == outcome::timed_out) {
        log(level::error, where, "not done after %g s (NEURON_RT_EXEC_TIMEOUT); the helper is ended", timeout);
        helper.obituary();
        return NRT_TIMEOUT;
    }
    log(level::error, where, "the helper %s; the next call starts another", helper.obituary().c_str());
    return NRT_HW_ERROR;
}

outcome load(nrt_model & model, simulator::helper & helper, NRT_STATUS & status) {
    const simulator::protocol::load request = {
        simulator::protocol::LOAD, model.neff->in().index(), model.neff->offset(), model.neff_size, model.ranks, 0
    };
    std::vector<uint8_t> message(sizeof(request));
    memcpy(message.data(), &request, sizeof(request));
    const outcome result = helper.call(message, 0);
    if (result != outcome::answered) {
        return result;
    }
    status = answered(message, model.ranks > 0 ? "nrt_load_collectives" : "nrt_load");
    if (status != NRT_SUCCESS) {
        return result;
    }
    std::vector<tensor_info>    tensors;
    simulator::protocol::loaded loaded{};
    if (!read_tensors(message, loaded, tensors)) {
        log(level::error, "nrt_load", "the helper's answer makes no sense: is its kernelgen of another version?");
        status = NRT_FAILURE;
        return result;
    }
    model.helper_number = helper.number();
    model.number        = loaded.model;
    if (model.tensors.empty()) {  // concurrent threads read these
        model.tensors      = std::move(tensors);
        model.needed       = loaded.scratchpad;
        model.code         = loaded.code;
        model.descriptors  = loaded.descriptors;
        model.core_version = loaded.core_version;
        model.collectives  = loaded.collectives;
    }
    return result;
}

// Unloads a model in the helper.
static void forget(runtime & rt, nrt_model & model) {
    std::shared_ptr<simulator::helper> helper;
    {
        const std::lock_guard<std::mutex> lock(rt.helper_mutex);
        helper = rt.helper;
    }
    const std::lock_guard<std::mutex> lock(model.mutex);
    if (helper != nullptr && helper->number() == model.helper_number) {
        const simulator::protocol::unload request = { simulator::protocol::UNLOAD, 0, model.number };
        std::vector<uint8_t>              message(sizeof(request));
        memcpy(message.data(), &request, sizeof(request));
        helper->call(message, 0);  // a helper that has ended holds no models
    }
}

// Returns false, and logs it, when the NEFF was compiled for another number of physical cores per logical core than the
// machine has.
static bool is_for_these_cores(const runtime & rt, uint32_t lnc, const char * where) {
    const bool good = rt.config.lnc == 0 || lnc == rt.config.lnc;
    if (!good) {
        log(level::error, where, "compiled with --lnc %u, and the logical cores have %u", lnc, rt.config.lnc);
    }
    return good;
}

// Counts the memory that a program takes on its core. Returns false if there is not enough.
static bool charge_program(runtime & rt, nrt_model & model) {
    // The least that a small NEFF takes. Source: AWS Neuron, "Neuron device memory" of the troubleshooting guide.
    constexpr size_t SMALL    = size_t(250) << 10;
    constexpr size_t LARGER   = 64;  // with NEURON_SIMULATOR_FAULT=bloat
    const auto &     programs = rt.programs[model.core];
    const size_t     size     = std::max(SMALL, model.code) * (rt.faults.strikes("bloat") ? LARGER : 1);
    if (!programs->add(size)) {
        return false;
    }
    model.size     = size;
    model.programs = programs;
    return true;
}

static NRT_STATUS no_memory_for(const runtime & rt, const nrt_model & model, size_t scratchpad, const char * where) {
    log(level::error, where,
        "no device memory for a program on core %u: %zu of %zu bytes are in use, its code and rings have %zu, and its "
        "scratchpad %zu",
        model.core, rt.arenas[model.core]->used(), rt.arenas[model.core]->size(), model.code, scratchpad);
    return NRT_RESOURCE;
}

// The largest number of DMA descriptors in a ring. All of them are made when a program is loaded. Source: published
// programs that failed to load, with the runtime's own message.
static constexpr uint64_t MAX_DESCRIPTORS = 16777200;

// Checks that the model is compiled for the core's version, and counts the memory that it takes: code, rings, and the
// part of its scratchpad that the state buffer does not hold.
static NRT_STATUS check_needs(runtime & rt, nrt_model & model, const char * where) {
    const simulator::instance * profile = rt.config.profile;
    if (profile != nullptr && model.core_version != 0 && model.core_version != profile->version) {
        const bool older = model.core_version < profile->version;
        if (!older || !rt.config.older_neffs) {
            log(level::error, where, "compiled for NeuronCores v%u, and those of a %s are v%u%s", model.core_version,
                profile->name, profile->version, older ? " (NEURON_RT_ALLOW_LEGACY_NEFF)" : "");
            return NRT_UNSUPPORTED_NEFF_VERSION;
        }
    }
    if (model.descriptors > MAX_DESCRIPTORS) {
        log(level::error, where,
            "Descriptor limit reached: the program has some %llu descriptors of DMA, and a ring has %llu at most; make "
            "it "
            "smaller, with fewer layers, tokens or gathers",
            static_cast<unsigned long long>(model.descriptors), static_cast<unsigned long long>(MAX_DESCRIPTORS));
        return NRT_RESOURCE;
    }
    if (!charge_program(rt, model)) {
        return no_memory_for(rt, model, 0, where);
    }
    const size_t scratchpad = model.needed - std::min(model.needed, rt.config.state_buffer());
    if (!model.programs->add_scratchpad(scratchpad)) {
        return no_memory_for(rt, model, scratchpad, where);
    }
    model.scratchpad = scratchpad;
    return NRT_SUCCESS;
}

// A program and the core on which to load it: the arguments of nrt_load and nrt_load_collectives.
struct loading {
    const char * where;
    const void * neff;
    size_t       size;
    int32_t      vnc;
    int32_t      vnc_count;
    uint32_t     rank;
    uint32_t     ranks;  // 0: nrt_load
};

// Loads a program onto its core.
static NRT_STATUS load_model(runtime & rt, const loading & from, std::shared_ptr<nrt_model> & out) {
    const char * const where = from.where;
    std::string        why;
    const NRT_STATUS   readable = simulator::check_neff_header(from.neff, from.size, why);
    if (readable != NRT_SUCCESS) {
        log(level::error, where, "%s", why.c_str());
        return readable;
    }
    if (rt.faults.strikes("load")) {
        log(level::error, where, "NEURON_SIMULATOR_FAULT=load");
        return NRT_FAILURE;
    }
    const int64_t first = std::max(from.vnc, 0);
    const int64_t count = std::max(from.vnc_count, 1);  // a simulated NEFF requires one core
    if (first + count > rt.cores()) {
        log(level::error, where, "cores %d to %d are wanted, %u are visible", static_cast<int>(first),
            static_cast<int>(first + count - 1), rt.cores());
        return NRT_LOAD_NOT_ENOUGH_NC;
    }
    const NRT_STATUS core = core_status(rt, static_cast<uint32_t>(first), where);
    if (core != NRT_SUCCESS || is_out_of_memory(rt, where)) {
        return core != NRT_SUCCESS ? core : NRT_RESOURCE;
    }
    auto model   = std::make_shared<nrt_model>();
    model->core  = static_cast<uint32_t>(first);
    model->rank  = from.rank;
    model->ranks = from.ranks;
    model->neff  = simulator::memory::allocate(rt.host(), from.size);
    if (model->neff == nullptr) {
        log(level::error, where, "no host memory for a NEFF of %zu bytes", from.size);
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
    model->neff_size = from.size;
    memcpy(model->neff->data(), from.neff, from.size);
    if (rt.config.strict && !is_for_these_cores(rt, simulator::lnc_of_neff(from.neff), where)) {
        return NRT_INVALID;
    }
    NRT_STATUS status =
        with_helper(rt, *model, 0, where, [](simulator::helper &, NRT_STATUS &) { return outcome::answered; });
    if (status == NRT_SUCCESS && rt.config.strict) {
        status = check_needs(rt, *model, where);
        if (status != NRT_SUCCESS) {
            forget(rt, *model);
        }
    }
    if (status == NRT_SUCCESS && rt.faults.strikes("subgraphs")) {
        model->tensors.push_back(
            { "intermediate0_sg0000", NRT_TENSOR_USAGE_OUTPUT, NRT_DTYPE_UINT8, 4096, -1, { 4096 }, true });
    }
    if (status == NRT_SUCCESS) {
        log(level::debug, where, "a NEFF of %zu bytes and %zu tensors on core %u", from.size, model->tensors.size(),
            model->core);
        out = std::move(model);
    }
    return status;
}

// Checks that all ranks have the same program, each on its own core.
static NRT_STATUS check_same(const runtime & rt, const std::vector<const void *> & models, const char * where) {
    const auto &          first = *static_cast<const nrt_model *>(models.front());
    std::vector<uint32_t> cores;
    for (const void * one : models) {
        const auto & model = *static_cast<const nrt_model *>(one);
        cores.push_back(model.core);
        if (model.neff_size != first.neff_size ||
            memcmp(model.neff->data(), first.neff->data(), first.neff_size) != 0) {
            log(level::error, where, "ranks %u and %u load different NEFFs: all ranks of a program load the same one",
                first.rank, model.rank);
            return NRT_INVALID;
        }
    }
    return are_cores_of_ranks(rt, cores, where) ? NRT_SUCCESS : NRT_INVALID;
}

// Waits until all ranks have loaded the program.
static NRT_STATUS wait_for_ranks(runtime & rt, nrt_model & model, const char * where) {
    model.group             = rt.ranks.join(ranks::LOAD, model.rank, model.ranks);
    const NRT_STATUS status = model.group->meet(
        model.rank, &model, rt.config.load_timeout,
        [&rt, where](const std::vector<const void *> & models) { return check_same(rt, models, where); }, where);
    if (status != NRT_SUCCESS) {
        rt.ranks.give_up(model.group);
        forget(rt, model);
    }
    return status;
}

}  // namespace simulator

using namespace simulator;

NRT_STATUS nrt_load(const void * neff, size_t size, int32_t start_vnc, int32_t vnc_count, nrt_model_t ** out) {
    const char * const where = "nrt_load";
    return with_runtime(where, [&](runtime & rt) {
        if (neff == nullptr || out == nullptr || start_vnc < -1 || vnc_count < -1) {
            return invalid(where, "a null pointer, or a number of cores below -1");
        }
        *out = nullptr;
        std::shared_ptr<nrt_model> model;
        const NRT_STATUS           status = load_model(rt, { where, neff, size, start_vnc, vnc_count, 0, 0 }, model);
        if (status == NRT_SUCCESS) {
            *out = rt.models.add(std::move(model));
        }
        return status;
    });
}

NRT_STATUS nrt_load_collectives(const void *   neff,
                                size_t         size,
                                int32_t        vnc,
                                int32_t        vnc_count,
                                uint32_t       ctx_device_id,
                                uint32_t       ctx_device_count,
                                nrt_model_t ** out) {
    const char * const where = "nrt_load_collectives";
    return with_runtime(where, [&](runtime & rt) {
        if (neff == nullptr || out == nullptr || vnc < -1 || vnc_count < -1) {
            return invalid(where, "a null pointer, or a number of cores below -1");
        }
        *out              = nullptr;
        NRT_STATUS status = check_ranks(rt, vnc, ctx_device_id, ctx_device_count, where);
        if (status != NRT_SUCCESS) {
            return status;
        }
        const uint32_t      core = vnc < 0 ? ctx_device_id : static_cast<uint32_t>(vnc);
        ranks::communicator global;
        if (rt.ranks.communicator_of(core, global) && global.second < ctx_device_count) {
            log(level::error, where, "nrt_build_global_comm was called for at most %u devices, and this program has %u",
                global.second, ctx_device_count);
            return NRT_INVALID;
        }
        std::shared_ptr<nrt_model> model;
        status = load_model(
            rt, { where, neff, size, static_cast<int32_t>(core), vnc_count, ctx_device_id, ctx_device_count }, model);
        if (status == NRT_SUCCESS) {
            status = wait_for_ranks(rt, *model, where);
        }
        if (status == NRT_SUCCESS) {
            *out = rt.models.add(std::move(model));
        }
        return status;
    });
}

NRT_STATUS nrt_unload(nrt_model_t * handle) {
    return with_runtime("nrt_unload", [&](runtime & rt) {
        check_freed(rt, handle, "nrt_unload");
        const auto model = rt.models.remove(handle);
        if (model == nullptr) {
            return invalid_handle("nrt_unload", "model");
        }
        forget(rt, *model);
        return NRT_SUCCESS;
    });
}

NRT_STATUS nrt_get_model_tensor_info(nrt_model_t * handle, nrt_tensor_info_array_t ** out) {
    const char * const where = "nrt_get_model_tensor_info";
    return with_runtime(where, [&](runtime & rt) {
        if (out == nullptr) {
            return invalid(where, "null pointer");
        }
        *out             = nullptr;
        const auto model = rt.models.find(handle);
        if (model == nullptr) {
            return invalid_handle(where, "model");
        }
        // One allocation holds the array and then the shapes.
        const size_t n     = model->tensors.size();
        const size_t array = sizeof(nrt_tensor_info_array_t) + n * sizeof(nrt_tensor_info_t);
        size_t       dims  = 0;
        for (const auto & tensor : model->tensors) {
            dims += tensor.shape.size();
        }
        auto * block = static_cast<nrt_tensor_info_array_t *>(calloc(1, array + dims * sizeof(uint32_t)));
        if (block == nullptr) {
            return NRT_FAIL_HOST_MEM_ALLOC;
        }
        auto * shape        = reinterpret_cast<uint32_t *>(reinterpret_cast<uint8_t *>(block) + array);
        block->tensor_count = n;
        for (size_t i = 0; i < n; i++) {
            const tensor_info & from = model->tensors[i];
            nrt_tensor_info_t & to   = block->tensor_array[i];
            memcpy(to.name, from.name.c_str(), from.name.size());  // shorter than the field, which is zeroed
            to.usage = from.usage;
            to.size  = from.size;
            to.dtype = from.dtype;
            to.ndim  = static_cast<uint32_t>(from.shape.size());
            to.shape = shape;
            shape    = std::copy(from.shape.begin(), from.shape.end(), shape);
        }
        if (n > 0 && rt.faults.strikes("names")) {
            block->tensor_array[n - 1].name[0] = '?';
        }
        *out = block;
        return NRT_SUCCESS;
    });
}

NRT_STATUS nrt_free_model_tensor_info(nrt_tensor_info_array_t * info) {
    free(info);
    return NRT_SUCCESS;
}
