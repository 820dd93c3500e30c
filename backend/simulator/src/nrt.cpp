// libnrt's functions, for simulated NeuronCores: the only symbols that the library exports.
//
// State is one object per process. It is never destroyed, because a client may call in from its own exit handlers, and a child
// of fork starts with a new one: the parent's tensors and helper are not the child's.

#include "../../nrt/nrt_api.h"
#include "arena.h"
#include "config.h"
#include "faults.h"
#include "fds.h"
#include "handles.h"
#include "helper.h"
#include "locks.h"
#include "log.h"
#include "neff.h"
#include "numbers.h"
#include "programs.h"
#include "protocol.h"
#include "units.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

using simulator::level;
using simulator::log;
using simulator::outcome;

namespace simulator {

// What stays with a core whatever is executed next.
struct core_state {
    std::atomic<bool> saw_nan{ false };  // an execution made something that is not a number: all later ones report it
    std::atomic<bool> lost{ false };     // NEURON_SIMULATOR_FAULT
    std::atomic<NRT_STATUS> owed{ NRT_SUCCESS };  // likewise: what the next call says of an execution before it
};

}  // namespace simulator

// ---- what handles stand for --------------------------------------------------------------------------------------------

struct nrt_tensor {
    nrt_tensor(std::shared_ptr<simulator::memory> memory, size_t offset, size_t size, const char * name) :
        memory(std::move(memory)), offset(offset), size(size), name(name == nullptr ? "" : name) {}

    const std::shared_ptr<simulator::memory> memory;
    const size_t                             offset;  // in `memory`
    const size_t                             size;
    const std::string                        name;

    uint8_t * data() const { return memory->data() + offset; }

    uint32_t arena() const { return memory->in().index(); }

    // Where the helper finds it.
    size_t position() const { return memory->offset() + offset; }

    bool holds(size_t at, size_t bytes) const { return at <= size && bytes <= size - at; }
};

// Tensors by name. Any number of threads may use a set at once. It owns no tensor: one that was freed since is noticed when it
// is used.
struct nrt_tensor_set {
    void put(const char * name, const std::shared_ptr<nrt_tensor> & tensor) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto & [own, old] : tensors_) {
            if (own == name) {
                old = tensor;
                return;
            }
        }
        tensors_.emplace_back(name, tensor);
    }

    // Returns false when there is none of this name; `out` is null when it was freed.
    bool find(const char * name, std::shared_ptr<nrt_tensor> & out) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const auto & [own, tensor] : tensors_) {
            if (own == name) {
                out = tensor.lock();
                return true;
            }
        }
        return false;
    }

  private:
    mutable std::mutex                                             mutex_;
    std::vector<std::pair<std::string, std::weak_ptr<nrt_tensor>>> tensors_;
};

namespace {

struct tensor_info {
    std::string           name;
    nrt_tensor_usage_t    usage;
    nrt_dtype_t           dtype;
    size_t                size;
    int32_t               alias;  // of an output: the input whose memory it is written to, or -1
    std::vector<uint32_t> shape;
};

}  // namespace

struct nrt_model {
    ~nrt_model() {
        if (programs) {
            programs->remove(scratchpad);
        }
    }

    uint32_t                             core;
    std::shared_ptr<simulator::programs> programs;          // the core's, when it has memory for this one
    size_t                               scratchpad = 0;    // bytes of it that were counted
    std::shared_ptr<simulator::memory>   neff;              // kept, for a helper that is started later
    size_t                               neff_size;
    std::vector<tensor_info>             tensors;           // inputs, then outputs
    size_t                               needed       = 0;  // bytes of memory besides these
    uint32_t                             core_version = 0;  // that it was compiled for; 0: not known

    std::mutex mutex;
    uint64_t   helper_number = 0;  // of the helper that knows it
    uint64_t   number        = 0;  // the model's, in that helper
};

struct nrta_error_tracker {
    std::shared_ptr<simulator::error_tracker> errors;
};

// ---- the process's state -----------------------------------------------------------------------------------------------

namespace {

enum class phase { fresh, open, closed };

struct runtime {
    std::atomic<phase>                                state{ phase::fresh };
    std::mutex                                        mutex;  // of nrt_init and nrt_close
    simulator::config                                 config;
    simulator::faults                                 faults;
    std::vector<std::shared_ptr<simulator::arena>>    arenas;  // one per visible core, and the host's
    simulator::handles<nrt_tensor>                    tensors;
    simulator::handles<nrt_tensor_set>                sets;
    simulator::handles<nrt_model>                     models;
    simulator::handles<nrta_error_tracker>            trackers;
    std::vector<simulator::unique_fd>                 locks;        // of the visible cores
    std::vector<std::shared_ptr<simulator::programs>> programs;     // by core
    std::vector<simulator::core_state>                core_states;  // by core

    std::unique_ptr<simulator::units> units;                        // what nrta_* queues; from nrt_init to the next

    std::mutex                         helper_mutex;                // guards what follows
    std::shared_ptr<simulator::helper> helper;

    std::chrono::steady_clock::time_point not_before;  // no helper is started until then

    const std::shared_ptr<simulator::arena> & host() const { return arenas.back(); }

    uint32_t cores() const { return static_cast<uint32_t>(config.visible.size()); }
};

std::atomic<runtime *> current{ nullptr };

void forked() {
    simulator::close_all_fds();
    current = new runtime;
}

runtime & process() {
    // As a static variable's initializer, it is run once however many threads come first.
    static const bool made = [] {
        current = new runtime;
        pthread_atfork(nullptr, nullptr, forked);
        return true;
    }();
    (void) made;
    return *current;
}

NRT_STATUS closed_or_not_open(const runtime & rt, const char * where) {
    const bool closed = rt.state == phase::closed;
    log(level::error, where, closed ? "nrt_close was called before" : "nrt_init was not called in this process");
    return closed ? NRT_CLOSED : NRT_UNINITIALIZED;
}

NRT_STATUS invalid(const char * where, const char * what) {
    log(level::error, where, "%s", what);
    return NRT_INVALID;
}

NRT_STATUS invalid_handle(const char * where, const char * what) {
    log(level::error, where, "%s: not a handle, or freed", what);
    return NRT_INVALID_HANDLE;
}

// Runs `body` on the open runtime. No exception leaves: the C++ library's are all of memory.
template <typename F> NRT_STATUS with_runtime(const char * where, F body) {
    try {
        runtime & rt = process();
        return rt.state == phase::open ? body(rt) : closed_or_not_open(rt, where);
    } catch (const std::exception & error) {
        log(level::error, where, "%s", error.what());
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
}

// Runs `body` on what the environment asks for, of which nrt_init need not have been called; not after nrt_close.
template <typename F> NRT_STATUS with_config(const char * where, F body) {
    try {
        if (process().state == phase::closed) {
            return closed_or_not_open(process(), where);
        }
        simulator::config config;
        std::string       error;
        if (!simulator::config::read(config, error)) {
            return invalid(where, error.c_str());
        }
        body(config);
        return NRT_SUCCESS;
    } catch (const std::exception & error) {
        log(level::error, where, "%s", error.what());
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
}

// ---- the helper --------------------------------------------------------------------------------------------------------

// What keeps a helper from starting is rarely gone a moment later, and a client may ask for hundreds of kernels.
constexpr std::chrono::seconds START_AGAIN_AFTER{ 5 };

// Returns the helper, started if need be; null when it does not start, which was logged.
std::shared_ptr<simulator::helper> get_helper(runtime & rt, const char * where) {
    const std::lock_guard<std::mutex> lock(rt.helper_mutex);
    if (rt.helper == nullptr || rt.helper->broken()) {
        rt.helper = nullptr;
        if (std::chrono::steady_clock::now() < rt.not_before) {
            log(level::debug, where, "there is no helper, as said before");
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
bool read_tensors(const std::vector<uint8_t> &  message,
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
    memcpy(&answer, message.data(), sizeof(answer));  // helper::call has seen to its being there
    const auto status = static_cast<NRT_STATUS>(answer.status);
    if (status != NRT_SUCCESS) {
        const std::string reason(message.begin() + sizeof(answer), message.end());
        log(level::error, where, "%s", reason.c_str());
    }
    return status;
}

// What a request that was not answered comes to.
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

// Makes the model known to the helper, and fills in what the helper says of it. The model's mutex is held.
outcome load(nrt_model & model, simulator::helper & helper, NRT_STATUS & status) {
    const simulator::protocol::load request = { simulator::protocol::LOAD, model.neff->in().index(),
                                                model.neff->offset(), model.neff_size };
    std::vector<uint8_t>            message(sizeof(request));
    memcpy(message.data(), &request, sizeof(request));
    const outcome result = helper.call(message, 0);
    if (result != outcome::answered) {
        return result;
    }
    status = answered(message, "nrt_load");
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
    if (model.tensors.empty()) {  // other threads read what is there
        model.tensors      = std::move(tensors);
        model.needed       = loaded.scratchpad;
        model.core_version = loaded.core_version;
    }
    return result;
}

// Runs `request(helper, status)` with a helper that knows the model. A helper that was gone before the request reached it is replaced;
// one that goes while it has the request fails the call.
template <typename F>
NRT_STATUS with_helper(runtime & rt, nrt_model & model, double timeout, const char * where, F request) {
    for (int attempt = 0;; attempt++) {
        const auto helper = get_helper(rt, where);
        if (helper == nullptr) {
            return NRT_FAILURE;
        }
        NRT_STATUS status = NRT_SUCCESS;
        outcome    result = outcome::answered;
        {
            const std::lock_guard<std::mutex> lock(model.mutex);
            if (model.helper_number != helper->number()) {
                timeout = 0;
                result  = load(model, *helper, status);
            }
        }
        if (result == outcome::answered && status == NRT_SUCCESS) {
            result = request(*helper, status);
        }
        if (result == outcome::answered) {
            return status;
        }
        if (result == outcome::not_sent && attempt == 0) {
            log(level::warning, where, "the helper %s; another is started", helper->obituary().c_str());
            continue;
        }
        return unanswered(result, *helper, timeout, where);
    }
}

// Has the helper forget a model.
void forget(runtime & rt, nrt_model & model) {
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
        helper->call(message, 0);  // a helper that is gone has forgotten it, too
    }
}

// ---- what programs need of a core --------------------------------------------------------------------------------------

// Returns false, which is logged, when the machine's logical cores have another number of physical ones than a NEFF's.
bool is_for_these_cores(const runtime & rt, uint32_t lnc, const char * where) {
    const bool good = rt.config.lnc == 0 || lnc == rt.config.lnc;
    if (!good) {
        log(level::error, where, "compiled with --lnc %u, and the logical cores have %u", lnc, rt.config.lnc);
    }
    return good;
}

// Counts the memory that a program takes on its core. Returns false when there is none.
bool charge_program(runtime & rt, nrt_model & model) {
    const auto & programs = rt.programs[model.core];
    if (!programs->add()) {
        return false;
    }
    model.programs = programs;
    return true;
}

NRT_STATUS no_memory_for(const runtime & rt, const nrt_model & model, size_t scratchpad, const char * where) {
    log(level::error, where,
        "no device memory for a program on core %u: %zu of %zu bytes are in use, and its scratchpad has %zu",
        model.core, rt.arenas[model.core]->used(), rt.arenas[model.core]->size(), scratchpad);
    return NRT_RESOURCE;
}

// Sees to the core's being of the version that a model, whose program was counted, is compiled for, and counts the model's scratchpad:
// what the state buffer does not hold.
NRT_STATUS check_needs(const runtime & rt, nrt_model & model, const char * where) {
    const simulator::instance * profile = rt.config.profile;
    if (profile != nullptr && model.core_version != 0 && model.core_version != profile->version) {
        const bool older = model.core_version < profile->version;
        if (!older || !rt.config.older_neffs) {
            log(level::error, where, "compiled for NeuronCores v%u, and those of a %s are v%u%s", model.core_version,
                profile->name, profile->version, older ? " (NEURON_RT_ALLOW_LEGACY_NEFF)" : "");
            return NRT_UNSUPPORTED_NEFF_VERSION;
        }
    }
    const size_t scratchpad = model.needed - std::min(model.needed, rt.config.state_buffer());
    if (!model.programs->add_scratchpad(scratchpad)) {
        return no_memory_for(rt, model, scratchpad, where);
    }
    model.scratchpad = scratchpad;
    return NRT_SUCCESS;
}

// ---- tensors -----------------------------------------------------------------------------------------------------------

// Returns the arena of a core, or of the host; null when there is no such core.
std::shared_ptr<simulator::arena> arena_of(runtime & rt, nrt_tensor_placement_t placement, int vnc) {
    if (placement == NRT_TENSOR_PLACEMENT_HOST) {
        return rt.host();
    }
    if (placement != NRT_TENSOR_PLACEMENT_DEVICE || vnc < 0 || static_cast<uint32_t>(vnc) >= rt.cores()) {
        return nullptr;
    }
    return rt.arenas[static_cast<size_t>(vnc)];
}

// Returns what a call that concerns a core, or the host, says first: that the core is lost, or how an execution before it ended.
NRT_STATUS core_status(runtime & rt, uint32_t core, const char * where) {
    if (rt.faults.empty() || core >= rt.cores()) {
        return NRT_SUCCESS;
    }
    simulator::core_state & state = rt.core_states[core];
    if (state.lost) {
        log(level::error, where, "core %u is lost (NEURON_SIMULATOR_FAULT=lost)", core);
        return NRT_EXEC_UNIT_UNRECOVERABLE;
    }
    const NRT_STATUS owed = state.owed.exchange(NRT_SUCCESS);
    if (owed != NRT_SUCCESS) {
        log(level::error, where, "an execution before failed (NEURON_SIMULATOR_FAULT=deferred)");
    }
    return owed;
}

// Returns whether an allocation is to fail, and says so.
bool is_out_of_memory(runtime & rt, const char * where) {
    const bool now = rt.faults.strikes("memory");
    if (now) {
        log(level::error, where, "no memory (NEURON_SIMULATOR_FAULT=memory)");
    }
    return now;
}

// Returns a tensor of which bytes are to be used; null, with the status, when that can't be.
std::shared_ptr<nrt_tensor> tensor_range(runtime &            rt,
                                         const nrt_tensor_t * handle,
                                         size_t               offset,
                                         size_t               size,
                                         const char *         where,
                                         NRT_STATUS &         status) {
    auto tensor = rt.tensors.find(handle);
    if (tensor == nullptr) {
        status = invalid_handle(where, "tensor");
        return nullptr;
    }
    if (!tensor->holds(offset, size)) {
        log(level::error, where, "tensor '%s': %zu bytes at %zu are not within its %zu", tensor->name.c_str(), size,
            offset, tensor->size);
        status = NRT_INVALID;
        return nullptr;
    }
    status = core_status(rt, tensor->arena(), where);
    return status == NRT_SUCCESS ? tensor : nullptr;
}

// ---- execution ---------------------------------------------------------------------------------------------------------

// Finds the tensor that a set has for one of the model's and sees to its fitting.
NRT_STATUS bind_tensor(const runtime &               rt,
                       const nrt_model &             model,
                       const tensor_info &           info,
                       const nrt_tensor_set &        set,
                       const char *                  where,
                       std::shared_ptr<nrt_tensor> & out) {
    const char * const kind = info.usage == NRT_TENSOR_USAGE_INPUT ? "input" : "output";
    if (!set.find(info.name.c_str(), out)) {
        log(level::error, where, "the %s set has no tensor '%s'", kind, info.name.c_str());
        return NRT_FAILURE;
    }
    if (out == nullptr) {
        log(level::error, where, "%s '%s' was freed", kind, info.name.c_str());
        return NRT_INVALID_HANDLE;
    }
    const nrt_tensor & tensor = *out;
    if (tensor.size != info.size) {
        log(level::error, where, "%s '%s' has %zu bytes, the model's %zu", kind, info.name.c_str(), tensor.size,
            info.size);
        return NRT_EXEC_BAD_INPUT;
    }
    const size_t element = simulator::bytes_of(info.dtype);
    if (rt.config.strict && tensor.position() % element != 0) {
        log(level::error, where, "%s '%s' begins at byte %zu, which is not a multiple of its elements' %zu bytes", kind,
            info.name.c_str(), tensor.position(), element);
        return NRT_INVALID;
    }
    if (tensor.arena() != model.core && tensor.arena() != rt.host()->index()) {
        log(level::error, where, "%s '%s' is on core %u, the model on core %u", kind, info.name.c_str(), tensor.arena(),
            model.core);
        return NRT_INVALID;
    }
    return NRT_SUCCESS;
}

bool overlap(const nrt_tensor & a, const nrt_tensor & b) {
    return a.arena() == b.arena() && a.position() < b.position() + b.size && b.position() < a.position() + a.size;
}

// What a device does when an output overlaps another tensor is not documented, but for an input that it is declared to share
// memory with.
NRT_STATUS check_overlaps(const nrt_model &                                model,
                          const std::vector<std::shared_ptr<nrt_tensor>> & tensors,
                          const char *                                     where) {
    for (size_t i = 0; i < tensors.size(); i++) {
        const tensor_info & output = model.tensors[i];
        if (output.usage != NRT_TENSOR_USAGE_OUTPUT) {
            continue;
        }
        // Inputs come first, so each pair of outputs is looked at once.
        for (size_t k = 0; k < i; k++) {
            if (static_cast<int32_t>(k) != output.alias && overlap(*tensors[i], *tensors[k])) {
                log(level::error, where, "output '%s' overlaps '%s', which is not declared", output.name.c_str(),
                    model.tensors[k].name.c_str());
                return NRT_INVALID;
            }
        }
    }
    return NRT_SUCCESS;
}

// Makes what an execution leaves in its outputs wrong, in a way that NEURON_SIMULATOR_FAULT asks for.
class spoiler {
  public:
    // Before the execution.
    spoiler(simulator::faults &                              faults,
            const nrt_model &                                model,
            const std::vector<std::shared_ptr<nrt_tensor>> & tensors) : model_(model), tensors_(tensors) {
        if (faults.empty()) {
            return;
        }
        late_    = faults.strikes("late");
        aliases_ = faults.strikes("aliases");
        results_ = faults.strikes("results");
        before_.resize(tensors.size());
        for (size_t i = 0; i < tensors.size() && (late_ || aliases_); i++) {
            if (model.tensors[i].usage == NRT_TENSOR_USAGE_OUTPUT) {
                before_[i].assign(tensors[i]->data(), tensors[i]->data() + tensors[i]->size);
            }
        }
    }

    // After an execution that succeeded.
    void spoil() const {
        for (size_t i = 0; i < tensors_.size() && (late_ || aliases_ || results_); i++) {
            const tensor_info & info = model_.tensors[i];
            if (info.usage != NRT_TENSOR_USAGE_OUTPUT) {
                continue;
            }
            if (late_ || (aliases_ && info.alias >= 0)) {
                memcpy(tensors_[i]->data(), before_[i].data(), before_[i].size());
            } else if (results_) {
                memset(tensors_[i]->data(), 0, std::min<size_t>(tensors_[i]->size, 4));
            }
        }
    }

    // Instead of an execution that fails: results are half-written.
    void write_half() const {
        for (size_t i = 0; i < tensors_.size(); i++) {
            if (model_.tensors[i].usage == NRT_TENSOR_USAGE_OUTPUT) {
                memset(tensors_[i]->data(), 0x5A, (tensors_[i]->size + 1) / 2);
            }
        }
    }

  private:
    const nrt_model &                                model_;
    const std::vector<std::shared_ptr<nrt_tensor>> & tensors_;

    bool                              late_    = false;
    bool                              aliases_ = false;
    bool                              results_ = false;
    std::vector<std::vector<uint8_t>> before_;
};

// Returns what an execution comes to before it is made, because NEURON_SIMULATOR_FAULT says so; `done`: it is not made.
NRT_STATUS fault_of_execution(runtime & rt, uint32_t core, const spoiler & outputs, const char * where, bool & done) {
    done = true;
    if (rt.faults.strikes("lost")) {
        rt.core_states[core].lost = true;
        outputs.write_half();
    }
    const NRT_STATUS status = core_status(rt, core, where);
    if (status != NRT_SUCCESS) {
        return status;
    }
    if (rt.faults.strikes("execute")) {
        log(level::error, where, "NEURON_SIMULATOR_FAULT=execute");
        outputs.write_half();
        return NRT_EXEC_COMPLETED_WITH_ERR;
    }
    if (rt.faults.strikes("deferred")) {
        outputs.write_half();
        rt.core_states[core].owed = NRT_EXEC_COMPLETED_WITH_ERR;
        return NRT_SUCCESS;
    }
    done = false;
    return NRT_SUCCESS;
}

// Returns what an execution that succeeded comes to: a core that saw something that is not a number reports that from then on.
// Results in place of an input are not looked at: they may be large, and little of them new.
NRT_STATUS look_for_nan(runtime &                                        rt,
                        const nrt_model &                                model,
                        const std::vector<std::shared_ptr<nrt_tensor>> & tensors) {
    std::atomic<bool> & saw_nan = rt.core_states[model.core].saw_nan;
    for (size_t i = 0; i < tensors.size() && !saw_nan; i++) {
        const tensor_info & info = model.tensors[i];
        if (info.usage == NRT_TENSOR_USAGE_OUTPUT && info.alias < 0 &&
            simulator::holds_nan(info.dtype, tensors[i]->data(), tensors[i]->size)) {
            saw_nan = true;
            log(level::info, "nrt_execute",
                "output '%s' has an element that is not a number; core %u reports that from now on", info.name.c_str(),
                model.core);
        }
    }
    return saw_nan ? NRT_EXEC_COMPLETED_WITH_NUM_ERR : NRT_SUCCESS;
}

// Takes the time that launching a kernel is to take. Sleeping would take longer than what is asked for.
void wait_for_launch(double launch_us) {
    using clock      = std::chrono::steady_clock;
    const auto until = clock::now() + std::chrono::duration<double, std::micro>(launch_us);
    while (launch_us > 0 && clock::now() < until) {
    }
}

// A model and the memory that one execution of it uses.
struct execution {
    const char *                             where;
    std::shared_ptr<nrt_model>               model;
    std::vector<std::shared_ptr<nrt_tensor>> tensors;  // inputs, then outputs
    std::vector<uint8_t>                     message;  // for the helper
};

simulator::span span_of(const nrt_tensor & tensor, size_t offset, size_t size, bool written) {
    const size_t begin = tensor.position() + offset;
    return { tensor.arena(), begin, begin + size, written };
}

std::vector<simulator::span> spans_of(const execution & execution) {
    std::vector<simulator::span> spans;
    for (size_t i = 0; i < execution.tensors.size(); i++) {
        const nrt_tensor & tensor = *execution.tensors[i];
        const bool         output = execution.model->tensors[i].usage == NRT_TENSOR_USAGE_OUTPUT;
        spans.push_back(span_of(tensor, 0, tensor.size, output));
    }
    return spans;
}

// What an access is that does not wait for a request in flight on the same memory, is not documented. `own`: a queue that keeps its order.
NRT_STATUS check_in_flight(const runtime &                      rt,
                           const std::vector<simulator::span> & spans,
                           const simulator::unit *              own,
                           const char *                         where) {
    if (!rt.config.strict || !rt.units->busy(spans, own)) {
        return NRT_SUCCESS;
    }
    log(level::error, where, "a request in flight uses this memory, and its completion was not waited for");
    return NRT_INVALID;
}

// Sees to a model's tensors being there and fitting, and fills in an execution.
NRT_STATUS prepare(runtime & rt, const nrt_tensor_set & inputs, const nrt_tensor_set & outputs, execution & out) {
    namespace protocol         = simulator::protocol;
    nrt_model &        model   = *out.model;
    const char * const where   = out.where;
    auto &             tensors = out.tensors;
    auto &             message = out.message;
    const size_t       n       = model.tensors.size();

    tensors.resize(n);
    message.resize(sizeof(protocol::execute) + n * sizeof(protocol::binding));
    for (size_t i = 0; i < n; i++) {
        const tensor_info & info   = model.tensors[i];
        const bool          input  = info.usage == NRT_TENSOR_USAGE_INPUT;
        const NRT_STATUS    status = bind_tensor(rt, model, info, input ? inputs : outputs, where, tensors[i]);
        if (status != NRT_SUCCESS) {
            return status;
        }
        if (info.alias >= 0) {
            const nrt_tensor & source = *tensors[static_cast<size_t>(info.alias)];
            if (source.arena() != tensors[i]->arena() || source.position() != tensors[i]->position()) {
                log(level::error, where, "output '%s' is to be the memory of input '%s' and is not", info.name.c_str(),
                    model.tensors[static_cast<size_t>(info.alias)].name.c_str());
                return NRT_INVALID;
            }
        }
        const protocol::binding binding = { tensors[i]->arena(), 0, tensors[i]->position() };
        memcpy(message.data() + sizeof(protocol::execute) + i * sizeof(binding), &binding, sizeof(binding));
    }
    return rt.config.strict ? check_overlaps(model, tensors, where) : NRT_SUCCESS;
}

NRT_STATUS run(runtime & rt, const execution & execution) {
    namespace protocol         = simulator::protocol;
    const char * const where   = execution.where;
    nrt_model &        model   = *execution.model;
    const auto &       tensors = execution.tensors;
    const auto &       message = execution.message;
    const size_t       n       = tensors.size();

    const spoiler outputs_of(rt.faults, model, tensors);
    if (!rt.faults.empty()) {
        bool             made   = false;
        const NRT_STATUS status = fault_of_execution(rt, model.core, outputs_of, where, made);
        if (made) {
            return status;
        }
    }
    const double     timeout = rt.config.exec_timeout;
    const NRT_STATUS done =
        with_helper(rt, model, timeout, where, [&](simulator::helper & helper, NRT_STATUS & status) {
            protocol::execute request = { protocol::EXECUTE, static_cast<uint32_t>(n), 0 };
            {
                const std::lock_guard<std::mutex> lock(model.mutex);
                if (model.helper_number != helper.number()) {
                    return outcome::not_sent;  // another thread has seen it go, and start again
                }
                request.model = model.number;
            }
            std::vector<uint8_t> answer = message;
            memcpy(answer.data(), &request, sizeof(request));
            if (rt.faults.strikes("kill")) {
                helper.doom();
            }
            const outcome result = helper.call(answer, timeout);
            if (result == outcome::answered) {
                status = answered(answer, where);
            }
            return result;
        });
    if (done != NRT_SUCCESS) {
        return done;
    }
    outputs_of.spoil();
    return rt.config.strict ? look_for_nan(rt, model, tensors) : done;
}

NRT_STATUS prepare_handles(runtime &                rt,
                           nrt_model_t *            model_handle,
                           const nrt_tensor_set_t * inputs,
                           const nrt_tensor_set_t * outputs,
                           const char *             where,
                           execution &              out) {
    const auto in   = rt.sets.find(inputs);
    const auto into = rt.sets.find(outputs);
    out.where       = where;
    out.model       = rt.models.find(model_handle);
    if (out.model == nullptr || in == nullptr || into == nullptr) {
        return invalid_handle(where, out.model == nullptr ? "model" : in == nullptr ? "input set" : "output set");
    }
    return prepare(rt, *in, *into, out);
}

// A copy between two tensors.
struct copying {
    std::shared_ptr<nrt_tensor> source;
    std::shared_ptr<nrt_tensor> destination;
    size_t                      source_offset      = 0;
    size_t                      destination_offset = 0;
    size_t                      size               = 0;

    std::vector<simulator::span> spans() const {
        return { span_of(*source, source_offset, size, false), span_of(*destination, destination_offset, size, true) };
    }

    NRT_STATUS run(runtime & rt) const {
        const size_t copied = rt.faults.strikes("copies") ? size / 2 : size;
        memmove(destination->data() + destination_offset, source->data() + source_offset, copied);
        return NRT_SUCCESS;
    }
};

NRT_STATUS prepare_copy(runtime &            rt,
                        const nrt_tensor_t * source,
                        size_t               source_offset,
                        const nrt_tensor_t * destination,
                        size_t               destination_offset,
                        size_t               size,
                        const char *         where,
                        copying &            out) {
    NRT_STATUS status;
    out.source = tensor_range(rt, source, source_offset, size, where, status);
    if (out.source == nullptr) {
        return status;
    }
    out.destination = tensor_range(rt, destination, destination_offset, size, where, status);
    if (out.destination == nullptr) {
        return status;
    }
    const uint32_t host = rt.host()->index();
    const uint32_t from = out.source->arena();
    const uint32_t to   = out.destination->arena();
    if (from != to && from != host && to != host) {
        log(level::error, where, "from core %u to core %u", from, to);
        return NRT_INVALID;
    }
    out.source_offset      = source_offset;
    out.destination_offset = destination_offset;
    out.size               = size;
    return NRT_SUCCESS;
}

// Sees to what a request in flight uses staying until it is done.
void check_freed(const runtime & rt, const void * handle, const char * where) {
    if (rt.state == phase::open && rt.config.strict && rt.units->freed(handle)) {
        log(level::error, where, "a request in flight uses it; that request fails");
    }
}

}  // namespace

// ---- process -----------------------------------------------------------------------------------------------------------

NRT_STATUS nrt_init(nrt_framework_type_t framework, const char * fw_version, const char * fal_version) {
    const char * const where = "nrt_init";
    (void) fw_version;
    (void) fal_version;
    try {
        runtime &                         rt = process();
        const std::lock_guard<std::mutex> lock(rt.mutex);
        if (rt.state == phase::open) {
            return invalid(where, "called twice");
        }
        if (rt.state == phase::closed) {
            return closed_or_not_open(rt, where);
        }
        if (framework == NRT_FRAMEWORK_TYPE_INVALID) {
            return invalid(where, "framework type 0");
        }
        std::string error;
        if (!simulator::config::read(rt.config, error)) {
            return invalid(where, error.c_str());
        }
        rt.faults.read(rt.config.fault, error);  // config::read has seen to its being good
        if (rt.faults.strikes("init")) {
            log(level::error, where, "NEURON_SIMULATOR_FAULT=init");
            return NRT_FAILURE;
        }
        if (!rt.config.lock_folder.empty() &&
            !simulator::lock_cores(rt.config.lock_folder, rt.config.any_of, rt.config.visible, rt.locks, error)) {
            log(level::error, where, "%s", error.c_str());
            return NRT_RESOURCE;
        }
        std::vector<std::shared_ptr<simulator::arena>> arenas;
        for (uint32_t i = 0; i <= rt.cores(); i++) {
            const bool        host = i == rt.cores();
            const std::string name = host ? "neuron-host" : "neuron-core-" + std::to_string(i);
            arenas.push_back(
                simulator::arena::create(i, name.c_str(), host ? rt.config.host_memory : rt.config.memory, error));
            if (arenas.back() == nullptr) {
                log(level::error, where, "%s", error.c_str());
                return NRT_RESOURCE;
            }
        }
        rt.arenas = std::move(arenas);
        rt.programs.clear();
        for (uint32_t i = 0; i < rt.cores(); i++) {
            rt.programs.push_back(std::make_shared<simulator::programs>(rt.arenas[i], rt.config.microcode(),
                                                                        rt.config.scratchpad_page()));
        }
        rt.core_states = std::vector<simulator::core_state>(rt.cores());
        rt.units       = std::make_unique<simulator::units>(rt.cores(), rt.config.queue);
        rt.state       = phase::open;
        if (rt.config.in_flight > 0 && !rt.config.returns_early()) {
            log(level::warning, where, "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS has no meaning since release 2.32");
        }
        log(level::info, where, "%u simulated cores of %zu bytes", rt.cores(), rt.config.memory);
        return NRT_SUCCESS;
    } catch (const std::exception & error) {
        log(level::error, where, "%s", error.what());
        return NRT_FAIL_HOST_MEM_ALLOC;
    }
}

void nrt_close(void) {
    runtime &                         rt = process();
    const std::lock_guard<std::mutex> lock(rt.mutex);
    if (rt.state != phase::open) {
        return;  // there is nothing to close, and no way to say so
    }
    rt.state = phase::closed;
    rt.units->stop();
    rt.models.clear();
    rt.sets.clear();
    rt.tensors.clear();
    rt.trackers.clear();
    rt.locks.clear();
    const std::lock_guard<std::mutex> helper_lock(rt.helper_mutex);
    rt.helper = nullptr;
}

const char * nrt_get_status_as_str(NRT_STATUS status) {
#define X(name) \
    case name:  \
        return #name;
    switch (status) {
        X(NRT_SUCCESS)
        X(NRT_FAILURE)
        X(NRT_INVALID)
        X(NRT_INVALID_HANDLE)
        X(NRT_RESOURCE)
        X(NRT_TIMEOUT)
        X(NRT_HW_ERROR)
        X(NRT_QUEUE_FULL)
        X(NRT_LOAD_NOT_ENOUGH_NC)
        X(NRT_UNSUPPORTED_NEFF_VERSION)
        X(NRT_FAIL_HOST_MEM_ALLOC)
        X(NRT_UNINITIALIZED)
        X(NRT_CLOSED)
        X(NRT_QUEUE_EMPTY)
        X(NRT_EXEC_UNIT_UNRECOVERABLE)
        X(NRT_EXEC_BAD_INPUT)
        X(NRT_EXEC_COMPLETED_WITH_NUM_ERR)
        X(NRT_EXEC_COMPLETED_WITH_ERR)
        X(NRT_EXEC_NC_BUSY)
        X(NRT_EXEC_OOB)
    }
#undef X
    return "unknown status";
}

NRT_STATUS nrt_get_version(nrt_version_t * version, size_t size) {
    if (version == nullptr || size == 0) {
        return invalid("nrt_get_version", "no room for the version");
    }
    nrt_version_t own = {};
    own.rt_major      = 2;
    // That of SDK 2.29 has 2.31, and so on.
    simulator::config config;
    std::string       error;
    own.rt_minor = (simulator::config::read(config, error) ? config : simulator::config()).release + 2;
    strncpy(own.rt_detail, "neuron-kernelgen simulator", sizeof(own.rt_detail) - 1);
    memset(version, 0, size);
    memcpy(version, &own, std::min(size, sizeof(own)));
    return NRT_SUCCESS;
}

NRT_STATUS nrt_get_total_vnc_count(uint32_t * count) {
    const char * const where = "nrt_get_total_vnc_count";
    if (count == nullptr) {
        return invalid(where, "null pointer");
    }
    return with_config(where, [&](const simulator::config & config) { *count = config.total; });
}

NRT_STATUS nrt_get_visible_vnc_count(uint32_t * count) {
    return with_runtime("nrt_get_visible_vnc_count", [&](runtime & rt) {
        if (count == nullptr) {
            return invalid("nrt_get_visible_vnc_count", "null pointer");
        }
        *count = rt.cores();
        return NRT_SUCCESS;
    });
}

NRT_STATUS nrt_get_vnc_memory_stats(uint32_t vnc, nrt_vnc_memory_stats_t * stats, size_t size_in, size_t * size_out) {
    const char * const where = "nrt_get_vnc_memory_stats";
    return with_runtime(where, [&](runtime & rt) {
        if (stats == nullptr || vnc >= rt.cores()) {
            return invalid(where, stats == nullptr ? "null pointer" : "no such core");
        }
        const nrt_vnc_memory_stats_t own  = { rt.arenas[vnc]->used(), rt.arenas[vnc]->size() };
        const size_t                 size = std::min(size_in, sizeof(own));
        memcpy(stats, &own, size);
        if (size_out != nullptr) {
            *size_out = size;
        }
        return NRT_SUCCESS;
    });
}

// AWS does not document whether this may be called before nrt_init; the driver knows it, and so it may here.
NRT_STATUS nrt_get_instance_info(nrt_instance_info_t * info, size_t size) {
    const char * const where = "nrt_get_instance_info";
    if (info == nullptr || size == 0) {
        return invalid(where, "no room for the information");
    }
    return with_config(where, [&](const simulator::config & config) {
        const simulator::instance * profile = config.profile;
        nrt_instance_info_t         own     = {};
        own.family                          = profile != nullptr ? profile->family : NRT_INSTANCE_UNKNOWN;
        own.size                            = profile != nullptr ? profile->size : NRT_INSTANCE_SIZE_UNKNOWN;
        strncpy(own.arch_name, "simulator", sizeof(own.arch_name) - 1);
        memset(info, 0, size);
        memcpy(info, &own, std::min(size, sizeof(own)));
    });
}

// ---- models ------------------------------------------------------------------------------------------------------------

NRT_STATUS nrt_load(const void * neff, size_t size, int32_t start_vnc, int32_t vnc_count, nrt_model_t ** out) {
    const char * const where = "nrt_load";
    return with_runtime(where, [&](runtime & rt) {
        if (neff == nullptr || out == nullptr || start_vnc < -1 || vnc_count < -1) {
            return invalid(where, "a null pointer, or a number of cores below -1");
        }
        *out = nullptr;
        std::string      why;
        const NRT_STATUS readable = simulator::check_neff_header(neff, size, why);
        if (readable != NRT_SUCCESS) {
            log(level::error, where, "%s", why.c_str());
            return readable;
        }
        if (rt.faults.strikes("load")) {
            log(level::error, where, "NEURON_SIMULATOR_FAULT=load");
            return NRT_FAILURE;
        }
        const int64_t first = std::max(start_vnc, 0);
        const int64_t count = std::max(vnc_count, 1);  // a simulated NEFF wants one
        if (first + count > rt.cores()) {
            log(level::error, where, "cores %d to %d are wanted, %u are visible", static_cast<int>(first),
                static_cast<int>(first + count - 1), rt.cores());
            return NRT_LOAD_NOT_ENOUGH_NC;
        }
        const NRT_STATUS core = core_status(rt, static_cast<uint32_t>(first), where);
        if (core != NRT_SUCCESS || is_out_of_memory(rt, where)) {
            return core != NRT_SUCCESS ? core : NRT_RESOURCE;
        }
        auto model  = std::make_shared<nrt_model>();
        model->core = static_cast<uint32_t>(first);
        model->neff = simulator::memory::allocate(rt.host(), size);
        if (model->neff == nullptr) {
            log(level::error, where, "no host memory for a NEFF of %zu bytes", size);
            return NRT_FAIL_HOST_MEM_ALLOC;
        }
        model->neff_size = size;
        memcpy(model->neff->data(), neff, size);
        if (rt.config.strict && !is_for_these_cores(rt, simulator::lnc_of_neff(neff), where)) {
            return NRT_INVALID;
        }
        if (rt.config.strict && !charge_program(rt, *model)) {
            return no_memory_for(rt, *model, 0, where);
        }
        NRT_STATUS status =
            with_helper(rt, *model, 0, where, [](simulator::helper &, NRT_STATUS &) { return outcome::answered; });
        if (status == NRT_SUCCESS && rt.config.strict) {
            status = check_needs(rt, *model, where);
            if (status != NRT_SUCCESS) {
                forget(rt, *model);
            }
        }
        if (status == NRT_SUCCESS) {
            log(level::debug, where, "a NEFF of %zu bytes and %zu tensors on core %u", size, model->tensors.size(),
                model->core);
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

namespace {

// Returns a request for an execution, whose launch takes its time from now.
std::shared_ptr<simulator::request> request_for(runtime &                rt,
                                                execution                launch,
                                                const nrt_tensor_set_t * inputs,
                                                const nrt_tensor_set_t * outputs,
                                                const nrt_model_t *      handle) {
    auto made     = std::make_shared<simulator::request>();
    made->spans   = spans_of(launch);
    made->handles = { handle, inputs, outputs };
    made->not_before =
        simulator::request::clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(rt.config.launch_us * 1000));
    for (const auto & tensor : launch.tensors) {
        made->handles.push_back(tensor.get());
    }
    made->run = [&rt, launch = std::move(launch)] {
        return run(rt, launch);
    };
    return made;
}

// What nrt_execute does with NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS before release 2.32. How an execution ended is told to a
// function that a client registers, which is not simulated: it is logged.
NRT_STATUS return_early(runtime &                rt,
                        execution                launch,
                        const nrt_tensor_set_t * inputs,
                        const nrt_tensor_set_t * outputs,
                        const nrt_model_t *      handle) {
    simulator::unit * const unit = rt.units->find(launch.model->core, NRTA_XU_COMPUTE, 0);
    nrta_seq_t              seq;
    return unit->submit(request_for(rt, std::move(launch), inputs, outputs, handle), seq, rt.config.in_flight);
}

}  // namespace

NRT_STATUS nrt_execute(nrt_model_t * handle, const nrt_tensor_set_t * inputs, nrt_tensor_set_t * outputs) {
    return with_runtime("nrt_execute", [&](runtime & rt) {
        execution  launch;
        NRT_STATUS status = prepare_handles(rt, handle, inputs, outputs, "nrt_execute", launch);
        if (status == NRT_SUCCESS) {
            // A queue keeps its order.
            const bool early = rt.config.returns_early();
            auto *     own   = early ? rt.units->find(launch.model->core, NRTA_XU_COMPUTE, 0) : nullptr;
            status           = check_in_flight(rt, spans_of(launch), own, launch.where);
        }
        if (status != NRT_SUCCESS) {
            return status;
        }
        if (rt.config.returns_early()) {
            return return_early(rt, std::move(launch), inputs, outputs, handle);
        }
        wait_for_launch(rt.config.launch_us);
        return run(rt, launch);
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
        // One block: the array, then the shapes.
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
            memcpy(to.name, from.name.c_str(), from.name.size());  // shorter than the zeroed field
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

// ---- tensor sets -------------------------------------------------------------------------------------------------------

NRT_STATUS nrt_allocate_tensor_set(nrt_tensor_set_t ** out) {
    return with_runtime("nrt_allocate_tensor_set", [&](runtime & rt) {
        if (out == nullptr) {
            return invalid("nrt_allocate_tensor_set", "null pointer");
        }
        *out = nullptr;
        if (is_out_of_memory(rt, "nrt_allocate_tensor_set")) {
            return NRT_RESOURCE;
        }
        *out = rt.sets.add(std::make_shared<nrt_tensor_set>());
        return NRT_SUCCESS;
    });
}

void nrt_destroy_tensor_set(nrt_tensor_set_t ** set) {
    if (set != nullptr && *set != nullptr) {
        // After nrt_close there are none: then it is not an error to find nothing.
        check_freed(process(), *set, "nrt_destroy_tensor_set");
        process().sets.remove(*set);
        *set = nullptr;
    }
}

NRT_STATUS nrt_add_tensor_to_tensor_set(nrt_tensor_set_t * handle, const char * name, nrt_tensor_t * tensor_handle) {
    const char * const where = "nrt_add_tensor_to_tensor_set";
    return with_runtime(where, [&](runtime & rt) {
        const auto set    = rt.sets.find(handle);
        const auto tensor = rt.tensors.find(tensor_handle);
        if (set == nullptr || tensor == nullptr) {
            return invalid_handle(where, set == nullptr ? "set" : "tensor");
        }
        if (name == nullptr || strlen(name) >= NRT_TENSOR_NAME_MAX) {
            return invalid(where, name == nullptr ? "a tensor without a name" : "a name of 256 bytes or more");
        }
        set->put(name, tensor);
        return NRT_SUCCESS;
    });
}

NRT_STATUS nrt_get_tensor_from_tensor_set(nrt_tensor_set_t * handle, const char * name, nrt_tensor_t ** out) {
    const char * const where = "nrt_get_tensor_from_tensor_set";
    return with_runtime(where, [&](runtime & rt) {
        const auto set = rt.sets.find(handle);
        if (set == nullptr) {
            return invalid_handle(where, "set");
        }
        if (name == nullptr || out == nullptr) {
            return invalid(where, "null pointer");
        }
        std::shared_ptr<nrt_tensor> tensor;
        if (!set->find(name, tensor)) {
            log(level::error, where, "the set has no tensor '%s'", name);
            return NRT_FAILURE;
        }
        *out = tensor.get();
        return *out == nullptr ? invalid_handle(where, name) : NRT_SUCCESS;
    });
}

// ---- tensors -----------------------------------------------------------------------------------------------------------

// A page of physical memory. Source: AWS Neuron, nrt_tensor_allocate in the developer guide of the runtime.
static constexpr size_t MAX_HOST_TENSOR = size_t(4) << 20;

NRT_STATUS nrt_tensor_allocate(nrt_tensor_placement_t placement,
                               int                    vnc,
                               size_t                 size,
                               const char *           name,
                               nrt_tensor_t **        out) {
    const char * const where = "nrt_tensor_allocate";
    return with_runtime(where, [&](runtime & rt) {
        if (out == nullptr || size == 0) {
            return invalid(where, out == nullptr ? "null pointer" : "0 bytes");
        }
        *out             = nullptr;
        const auto arena = arena_of(rt, placement, vnc);
        if (arena == nullptr) {
            log(level::error, where, "no core %d, or placement %d is none that is simulated", vnc,
                static_cast<int>(placement));
            return NRT_INVALID;
        }
        if (arena == rt.host() && rt.config.strict && size > MAX_HOST_TENSOR) {
            log(level::error, where, "%zu bytes for '%s' in the host's memory: 4 MiB are the most", size,
                name == nullptr ? "" : name);
            return NRT_INVALID;
        }
        if (arena != rt.host() && rt.config.overflows() && size >= size_t(1) << 32) {
            log(level::error, where, "%zu bytes for '%s': before release 2.28 sizes of 4 GiB and more overflow", size,
                name == nullptr ? "" : name);
            return NRT_INVALID;
        }
        const NRT_STATUS core = core_status(rt, arena->index(), where);
        if (core != NRT_SUCCESS || is_out_of_memory(rt, where)) {
            return core != NRT_SUCCESS ? core : NRT_RESOURCE;
        }
        auto memory = simulator::memory::allocate(arena, size);
        if (memory == nullptr) {
            log(level::error, where, "%zu bytes for '%s' on core %d: %zu of %zu are in use", size,
                name == nullptr ? "" : name, vnc, arena->used(), arena->size());
            return NRT_RESOURCE;
        }
        *out = rt.tensors.add(std::make_shared<nrt_tensor>(std::move(memory), 0, size, name));
        return NRT_SUCCESS;
    });
}

NRT_STATUS nrt_tensor_allocate_slice(const nrt_tensor_t * handle,
                                     size_t               offset,
                                     size_t               size,
                                     const char *         name,
                                     nrt_tensor_t **      out) {
    const char * const where = "nrt_tensor_allocate_slice";
    return with_runtime(where, [&](runtime & rt) {
        if (out == nullptr || size == 0) {
            return invalid(where, out == nullptr ? "null pointer" : "0 bytes");
        }
        *out = nullptr;
        NRT_STATUS status;
        const auto source = tensor_range(rt, handle, offset, size, where, status);
        if (offset % rt.config.slice_alignment != 0) {
            log(level::error, where, "offset %zu of '%s' is not a multiple of %zu (NEURON_SIMULATOR_SLICE_ALIGNMENT)",
                offset, name == nullptr ? "" : name, rt.config.slice_alignment);
            return NRT_INVALID;
        }
        if (source != nullptr && is_out_of_memory(rt, where)) {
            return NRT_RESOURCE;
        }
        if (source != nullptr) {
            const size_t at = source->offset + (rt.faults.strikes("slices") ? 0 : offset);
            *out            = rt.tensors.add(std::make_shared<nrt_tensor>(source->memory, at, size, name));
        }
        return status;
    });
}

void nrt_tensor_free(nrt_tensor_t ** handle) {
    if (handle != nullptr && *handle != nullptr) {
        check_freed(process(), *handle, "nrt_tensor_free");
        process().tensors.remove(*handle);
        *handle = nullptr;
    }
}

size_t nrt_tensor_get_size(const nrt_tensor_t * handle) {
    const auto tensor = process().tensors.find(handle);
    return tensor == nullptr ? 0 : tensor->size;
}

void * nrt_tensor_get_va(const nrt_tensor_t * handle) {
    runtime &  rt     = process();
    const auto tensor = rt.tensors.find(handle);
    // A device's memory is not the host's, and a client that took it for that would fail on a device.
    return tensor == nullptr || tensor->arena() != rt.host()->index() ? nullptr : tensor->data();
}

NRT_STATUS nrt_tensor_read(const nrt_tensor_t * handle, void * data, size_t offset, size_t size) {
    const char * const where = "nrt_tensor_read";
    return with_runtime(where, [&](runtime & rt) {
        NRT_STATUS status;
        const auto tensor = tensor_range(rt, handle, offset, size, where, status);
        if (tensor == nullptr || size == 0) {
            return status;
        }
        if (data == nullptr) {
            return invalid(where, "null pointer");
        }
        status = check_in_flight(rt, { span_of(*tensor, offset, size, false) }, nullptr, where);
        if (status == NRT_SUCCESS) {
            memcpy(data, tensor->data() + offset, size);
        }
        return status;
    });
}

NRT_STATUS nrt_tensor_write(nrt_tensor_t * handle, const void * data, size_t offset, size_t size) {
    const char * const where = "nrt_tensor_write";
    return with_runtime(where, [&](runtime & rt) {
        NRT_STATUS status;
        const auto tensor = tensor_range(rt, handle, offset, size, where, status);
        if (tensor == nullptr || size == 0) {
            return status;
        }
        if (data == nullptr) {
            return invalid(where, "null pointer");
        }
        status = check_in_flight(rt, { span_of(*tensor, offset, size, true) }, nullptr, where);
        if (status == NRT_SUCCESS) {
            tensor->memory->in().write(tensor->position() + offset, data, size);
        }
        return status;
    });
}

NRT_STATUS nrt_tensor_memset(nrt_tensor_t * handle, uint64_t offset, int value, size_t size) {
    const char * const where = "nrt_tensor_memset";
    return with_runtime(where, [&](runtime & rt) {
        NRT_STATUS status;
        const auto tensor = tensor_range(rt, handle, offset, size, where, status);
        if (tensor != nullptr) {
            status = check_in_flight(rt, { span_of(*tensor, offset, size, true) }, nullptr, where);
        }
        if (status == NRT_SUCCESS) {
            tensor->memory->in().fill(tensor->position() + offset, value, size);
        }
        return status;
    });
}

NRT_STATUS nrt_tensor_copy(const nrt_tensor_t * source_handle,
                           size_t               source_offset,
                           nrt_tensor_t *       destination_handle,
                           size_t               destination_offset,
                           size_t               size) {
    const char * const where = "nrt_tensor_copy";
    return with_runtime(where, [&](runtime & rt) {
        copying          copy;
        const NRT_STATUS status =
            prepare_copy(rt, source_handle, source_offset, destination_handle, destination_offset, size, where, copy);
        if (status != NRT_SUCCESS) {
            return status;
        }
        const NRT_STATUS ordered = check_in_flight(rt, copy.spans(), nullptr, where);
        return ordered == NRT_SUCCESS ? copy.run(rt) : ordered;
    });
}

// ---- requests in flight ------------------------------------------------------------------------------------------------

namespace {

// Runs `body` on the open runtime, if the release that is played has the function.
template <typename F> NRT_STATUS with_queues(const char * where, bool (simulator::config::*has)() const, F body) {
    return with_runtime(where, [&](runtime & rt) {
        if (!(rt.config.*has)()) {
            log(level::error, where, "release 2.%u of the SDK does not have it (NEURON_SIMULATOR_RELEASE)",
                rt.config.release);
            return NRT_FAILURE;
        }
        return body(rt);
    });
}

// Says where a request's status goes: where the caller wants it, or with release 2.28 to an error tracker, which is in its place.
NRT_STATUS report_to(runtime & rt, NRT_STATUS * ret, simulator::request & made, const char * where) {
    if (!rt.config.has_trackers()) {
        made.ret = ret;
        return ret != nullptr ? NRT_SUCCESS : invalid(where, "null pointer");
    }
    const auto tracker = rt.trackers.find(reinterpret_cast<nrta_error_tracker_t *>(ret));
    if (tracker == nullptr) {
        return invalid_handle(where, "error tracker");
    }
    made.tracker = tracker->errors;
    return NRT_SUCCESS;
}

// Queues a request.
NRT_STATUS submit(runtime &                           rt,
                  simulator::unit *                   unit,
                  std::shared_ptr<simulator::request> request,
                  const char *                        where,
                  nrta_seq_t *                        seq) {
    if (unit == nullptr || seq == nullptr) {
        return invalid(where, unit == nullptr ? "no such queue" : "null pointer");
    }
    const NRT_STATUS status = check_in_flight(rt, request->spans, unit, where);
    return status == NRT_SUCCESS ? unit->submit(std::move(request), *seq) : status;
}

// The core that a tensor's requests are queued on: its own, or the first for those in the host's memory.
uint32_t core_of(const runtime & rt, const nrt_tensor & tensor) {
    return tensor.arena() == rt.host()->index() ? 0 : tensor.arena();
}

NRT_STATUS schedule_transfer(const char *         where,
                             const nrt_tensor_t * handle,
                             void *               to,
                             const void *         from,
                             uint64_t             offset,
                             uint64_t             size,
                             int                  queue,
                             NRT_STATUS *         ret,
                             nrta_seq_t *         seq) {
    return with_queues(where, &simulator::config::has_queues, [&](runtime & rt) {
        NRT_STATUS status;
        const auto tensor = tensor_range(rt, handle, offset, size, where, status);
        if (tensor == nullptr) {
            return status;
        }
        if (to == nullptr && from == nullptr) {
            return invalid(where, "null pointer");
        }
        auto made     = std::make_shared<simulator::request>();
        made->spans   = { span_of(*tensor, offset, size, from != nullptr) };
        made->handles = { handle };
        made->run     = [tensor, to, from, offset, size] {
            if (to != nullptr) {
                memcpy(to, tensor->data() + offset, size);
            } else {
                tensor->memory->in().write(tensor->position() + offset, from, size);
            }
            return NRT_SUCCESS;
        };
        const NRT_STATUS told = report_to(rt, ret, *made, where);
        if (told != NRT_SUCCESS) {
            return told;
        }
        return submit(rt, rt.units->find(core_of(rt, *tensor), NRTA_XU_TENSOR_OP, queue), std::move(made), where, seq);
    });
}

}  // namespace

NRT_STATUS nrta_execute_schedule(nrt_model_t *            model,
                                 const nrt_tensor_set_t * inputs,
                                 nrt_tensor_set_t *       outputs,
                                 int                      queue,
                                 NRT_STATUS *             ret,
                                 nrta_seq_t *             seq) {
    const char * const where = "nrta_execute_schedule";
    return with_queues(where, &simulator::config::has_queues, [&](runtime & rt) {
        execution        launch;
        const NRT_STATUS status = prepare_handles(rt, model, inputs, outputs, where, launch);
        if (status != NRT_SUCCESS) {
            return status;
        }
        simulator::unit * const unit = rt.units->find(launch.model->core, NRTA_XU_COMPUTE, queue);
        auto                    made = request_for(rt, std::move(launch), inputs, outputs, model);
        const NRT_STATUS        told = report_to(rt, ret, *made, where);
        if (told != NRT_SUCCESS) {
            return told;
        }
        return submit(rt, unit, std::move(made), where, seq);
    });
}

NRT_STATUS nrta_tensor_write(nrt_tensor_t * tensor,
                             const void *   data,
                             uint64_t       offset,
                             uint64_t       size,
                             int            queue,
                             NRT_STATUS *   ret,
                             nrta_seq_t *   seq) {
    return schedule_transfer("nrta_tensor_write", tensor, nullptr, data, offset, size, queue, ret, seq);
}

NRT_STATUS nrta_tensor_read(void *         data,
                            nrt_tensor_t * tensor,
                            uint64_t       offset,
                            uint64_t       size,
                            int            queue,
                            NRT_STATUS *   ret,
                            nrta_seq_t *   seq) {
    return schedule_transfer("nrta_tensor_read", tensor, data, nullptr, offset, size, queue, ret, seq);
}

NRT_STATUS nrta_tensor_copy(nrt_tensor_t * source,
                            uint64_t       source_offset,
                            nrt_tensor_t * destination,
                            uint64_t       destination_offset,
                            uint64_t       size,
                            int            queue,
                            NRT_STATUS *   ret,
                            nrta_seq_t *   seq) {
    const char * const where = "nrta_tensor_copy";
    return with_queues(where, &simulator::config::has_queues, [&](runtime & rt) {
        copying          copy;
        const NRT_STATUS status =
            prepare_copy(rt, source, source_offset, destination, destination_offset, size, where, copy);
        if (status != NRT_SUCCESS) {
            return status;
        }
        auto made     = std::make_shared<simulator::request>();
        made->spans   = copy.spans();
        made->handles = { source, destination };
        made->run     = [&rt, copy] {
            return copy.run(rt);
        };
        const NRT_STATUS told = report_to(rt, ret, *made, where);
        if (told != NRT_SUCCESS) {
            return told;
        }
        simulator::unit * const unit = rt.units->find(core_of(rt, *copy.destination), NRTA_XU_TENSOR_OP, queue);
        return submit(rt, unit, std::move(made), where, seq);
    });
}

NRT_STATUS nrta_is_completed(nrta_seq_t seq, bool * completed) {
    const char * const where = "nrta_is_completed";
    return with_queues(where, &simulator::config::has_queues, [&](runtime & rt) {
        const simulator::unit * const unit = rt.units->find(seq);
        if (completed == nullptr) {
            return invalid(where, "null pointer");
        }
        if (unit == nullptr || !unit->completed(NRTA_SEQ_GET_SEQ_NUM(seq), *completed)) {
            return invalid(where, "no request has this sequence ID");
        }
        if (*completed && unit->last() != seq && rt.faults.strikes("order")) {
            *completed = false;
        }
        return NRT_SUCCESS;
    });
}

namespace {

// Release 2.28 has other numbers of the units, and units of their own for reading and writing, which are one here.
nrta_xu_t unit_of(const runtime & rt, nrta_xu_t kind) {
    if (!rt.config.has_trackers()) {
        return kind;
    }
    switch (static_cast<int>(kind)) {
        case NRTA_2_28_XU_TENSOR_READ:
        case NRTA_2_28_XU_TENSOR_WRITE:
        case NRTA_2_28_XU_TENSOR_OP:
            return NRTA_XU_TENSOR_OP;
        case NRTA_2_28_XU_COMPUTE:
            return NRTA_XU_COMPUTE;
        default:
            return NRTA_XU_COLLECTIVES;
    }
}

}  // namespace

NRT_STATUS nrta_get_sequence(uint32_t vnc, nrta_xu_t kind, int queue, nrta_seq_t * seq) {
    const char * const where = "nrta_get_sequence";
    return with_queues(where, &simulator::config::has_queues, [&](runtime & rt) {
        const simulator::unit * const unit = rt.units->find(vnc, unit_of(rt, kind), queue);
        if (unit == nullptr || seq == nullptr) {
            return invalid(where, unit == nullptr ? "no such queue" : "null pointer");
        }
        *seq = unit->last();
        return NRT_SUCCESS;
    });
}

NRT_STATUS nrta_event_register_seq_id_completion(nrta_seq_t seq, int event) {
    const char * const where = "nrta_event_register_seq_id_completion";
    return with_queues(where, &simulator::config::has_events, [&](runtime & rt) {
        // One of our own, since the caller's may be closed first.
        simulator::unique_fd    own(fcntl(event, F_DUPFD_CLOEXEC, 0));
        simulator::unit * const unit = rt.units->find(seq);
        if (!own) {
            return invalid(where, "not a file descriptor");
        }
        return unit != nullptr && unit->notify(NRTA_SEQ_GET_SEQ_NUM(seq), std::move(own))
                   ? NRT_SUCCESS
                   : invalid(where, "no request has this sequence ID");
    });
}

// ---- what release 2.28 has besides -------------------------------------------------------------------------------------

NRT_STATUS nrta_error_tracker_create(uint32_t vnc, nrta_error_tracker_t ** out) {
    const char * const where = "nrta_error_tracker_create";
    return with_queues(where, &simulator::config::has_trackers, [&](runtime & rt) {
        if (out == nullptr || vnc >= rt.cores()) {
            return invalid(where, out == nullptr ? "null pointer" : "no such core");
        }
        auto made    = std::make_shared<nrta_error_tracker>();
        made->errors = std::make_shared<simulator::error_tracker>();
        *out         = rt.trackers.add(std::move(made));
        return NRT_SUCCESS;
    });
}

void nrta_error_tracker_destroy(nrta_error_tracker_t * tracker) {
    process().trackers.remove(tracker);
}

NRT_STATUS nrta_error_tracker_get_list(nrta_error_tracker_t * handle, const nrta_error_t ** errors, size_t * count) {
    const char * const where = "nrta_error_tracker_get_list";
    return with_queues(where, &simulator::config::has_trackers, [&](runtime & rt) {
        const auto tracker = rt.trackers.find(handle);
        if (tracker == nullptr) {
            return invalid_handle(where, "error tracker");
        }
        if (errors == nullptr || count == nullptr) {
            return invalid(where, "null pointer");
        }
        const std::vector<nrta_error_t> & list = tracker->errors->list();
        *errors                                = list.data();
        *count                                 = list.size();
        return NRT_SUCCESS;
    });
}

NRT_STATUS nrta_get_completion_handle(nrta_seq_t seq, int * descriptor) {
    const char * const where = "nrta_get_completion_handle";
    return with_queues(where, &simulator::config::has_completion_handles, [&](runtime & rt) {
        if (descriptor == nullptr) {
            return invalid(where, "null pointer");
        }
        simulator::unit * const unit = rt.units->find(seq);
        const int               made = eventfd(0, EFD_CLOEXEC);
        simulator::unique_fd    own(made < 0 ? -1 : fcntl(made, F_DUPFD_CLOEXEC, 0));
        if (!own) {
            close(made);
            log(level::error, where, "no descriptor: %s", strerror(errno));
            return NRT_RESOURCE;
        }
        if (unit == nullptr || !unit->notify(NRTA_SEQ_GET_SEQ_NUM(seq), std::move(own))) {
            close(made);
            return invalid(where, "no request has this sequence ID");
        }
        *descriptor = made;
        return NRT_SUCCESS;
    });
}
