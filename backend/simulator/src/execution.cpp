// Execution of models: nrt_execute, and the parts that it shares with queued requests.

#include "execution.h"

#include "../../nrt/nrt_api.h"
#include "faults.h"
#include "helper.h"
#include "log.h"
#include "models.h"
#include "numbers.h"
#include "price.h"
#include "protocol.h"
#include "runtime.h"
#include "tensors.h"
#include "units.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace simulator {

// Finds the set's tensor for one of the model's tensors and checks its size and core.
static NRT_STATUS bind_tensor(const runtime &               rt,
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

static bool overlap(const nrt_tensor & a, const nrt_tensor & b) {
    return a.arena() == b.arena() && a.position() < b.position() + b.size && b.position() < a.position() + a.size;
}

// Refuses outputs that overlap another tensor: AWS does not document what a device does then. An output may overlap the
// input with which it is declared to share memory.
static NRT_STATUS check_overlaps(const nrt_model &                                model,
                                 const std::vector<std::shared_ptr<nrt_tensor>> & tensors,
                                 const char *                                     where) {
    for (size_t i = 0; i < tensors.size(); i++) {
        const tensor_info & output = model.tensors[i];
        if (output.usage != NRT_TENSOR_USAGE_OUTPUT) {
            continue;
        }
        // Inputs come first, so this loop compares each pair of outputs once.
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

// Corrupts the outputs of an execution in the way that NEURON_SIMULATOR_FAULT names.
class spoiler {
  public:
    // Prepares the faults, before the execution.
    spoiler(runtime & rt, const nrt_model & model, const std::vector<std::shared_ptr<nrt_tensor>> & tensors) :
        model_(model), tensors_(tensors) {
        simulator::faults & faults = rt.faults;
        if (faults.empty()) {
            return;
        }
        late_    = faults.strikes("late");
        aliases_ = faults.strikes("aliases");
        results_ = faults.strikes("results") || (rt.second && faults.strikes("process"));
        before_.resize(tensors.size());
        for (size_t i = 0; i < tensors.size() && (late_ || aliases_); i++) {
            if (model.tensors[i].usage == NRT_TENSOR_USAGE_OUTPUT) {
                before_[i].assign(tensors[i]->data(), tensors[i]->data() + tensors[i]->size);
            }
        }
    }

    // Injects the faults, after an execution that succeeded.
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

    // Writes half of each result, in place of an execution that fails.
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

// Returns the status of the faults that strike before an execution. `done`: the execution is skipped.
static NRT_STATUS fault_of_execution(runtime &       rt,
                                     uint32_t        core,
                                     const spoiler & outputs,
                                     const char *    where,
                                     bool &          done) {
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

// Returns the status of an execution that succeeded. A core that produced a NaN reports it from then on. Results that
// replace an input are not searched: they may be large, and only a small part of them is new.
static NRT_STATUS look_for_nan(runtime &                                        rt,
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

// Waits for the duration of a launch. It does not sleep, because a sleep would take longer than this.
static void wait_for_launch(double launch_us) {
    using clock      = std::chrono::steady_clock;
    const auto until = clock::now() + std::chrono::duration<double, std::micro>(launch_us);
    while (launch_us > 0 && clock::now() < until) {
    }
}

static std::vector<simulator::span> spans_of(const execution & execution) {
    std::vector<simulator::span> spans;
    for (size_t i = 0; i < execution.tensors.size(); i++) {
        const nrt_tensor & tensor = *execution.tensors[i];
        const bool         output = execution.model->tensors[i].usage == NRT_TENSOR_USAGE_OUTPUT;
        spans.push_back(span_of(tensor, 0, tensor.size, output));
    }
    return spans;
}

// Checks that a model's tensors exist and fit, and fills in an execution.
static NRT_STATUS prepare(runtime &              rt,
                          const nrt_tensor_set & inputs,
                          const nrt_tensor_set & outputs,
                          execution &            out) {
    namespace protocol         = simulator::protocol;
    nrt_model &        model   = *out.model;
    const char * const where   = out.where;
    auto &             tensors = out.tensors;
    auto &             message = out.message;
    const size_t       n       = model.tensors.size();

    tensors.resize(n);
    message.resize(sizeof(protocol::execute));
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
        if (!info.is_intermediate) {
            const protocol::binding binding = { tensors[i]->arena(), 0, tensors[i]->position() };
            message.resize(message.size() + sizeof(binding));
            memcpy(message.data() + message.size() - sizeof(binding), &binding, sizeof(binding));
        }
    }
    return rt.config.strict ? check_overlaps(model, tensors, where) : NRT_SUCCESS;
}

static uint32_t core_version_of(const runtime & rt, const nrt_model & model) {
    return rt.config.profile != nullptr ? rt.config.profile->version : model.core_version;
}

// Returns whether an execution of the model waits for other ranks.
static bool meets_others(const nrt_model & model) {
    return model.collectives > 0 && model.ranks > 1;
}

// Returns microseconds that a launch takes on the model's NeuronCore, with its collectives.
static double launch_us(const runtime & rt, const nrt_model & model, bool queued) {
    const price & own = price_of(core_version_of(rt, model));
    const double  us  = queued ? own.queued_us : own.waited_us;
    return us + (meets_others(model) ? collectives_us(own, queued, model.ranks, model.collectives) : 0);
}

// Returns whether a core's last executions, of which there are RINGS, have none of the same model with the same tensors.
static bool is_rebound(simulator::core_state & core, const execution & execution) {
    constexpr size_t    RINGS = 16;
    std::vector<size_t> key   = { reinterpret_cast<size_t>(execution.model.get()) };
    for (const auto & tensor : execution.tensors) {
        key.push_back(tensor->position());
    }
    const std::lock_guard<std::mutex> lock(core.mutex);
    const auto                        known  = std::find(core.rings.begin(), core.rings.end(), key);
    const bool                        is_new = known == core.rings.end();
    if (!is_new) {
        core.rings.erase(known);
    }
    core.rings.push_back(std::move(key));
    if (core.rings.size() > RINGS) {
        core.rings.pop_front();
    }
    return is_new;
}

// Advances the core's clock by the time that the execution takes on a device.
static void take_price(runtime & rt, const execution & execution) {
    constexpr uint64_t      SLOWER      = 20;       // with NEURON_SIMULATOR_FAULT=slow
    constexpr uint64_t      PREPARED_NS = 2000000;  // with NEURON_SIMULATOR_FAULT=rings
    const nrt_model &       model       = *execution.model;
    simulator::core_state & core        = rt.core_states[model.core];
    size_t                  bytes       = 0;
    core.executions++;
    for (size_t i = 0; i < execution.tensors.size(); i++) {
        const size_t        size = execution.tensors[i]->size;
        const tensor_info & info = model.tensors[i];
        bytes += size;
        if (info.usage == NRT_TENSOR_USAGE_INPUT) {
            core.bytes_read += size;
        } else if (info.alias >= 0) {
            core.bytes_read -= execution.tensors[static_cast<size_t>(info.alias)]->size;
        }
    }
    price own = price_of(core_version_of(rt, model));
    if (rt.config.gb_per_s > 0) {
        own.gb_per_s = rt.config.gb_per_s;
    }
    if (rt.config.launch_us > 0) {
        own.waited_us = own.queued_us = rt.config.launch_us;
    }
    uint64_t ns = price_ns(own, execution.queued, bytes);
    if (meets_others(model)) {
        ns += static_cast<uint64_t>(collectives_us(own, execution.queued, model.ranks, model.collectives) * 1000);
    }
    if (rt.faults.strikes("rings") && is_rebound(core, execution)) {
        ns += PREPARED_NS;
    }
    ns *= (rt.faults.strikes("slow") ? SLOWER : 1);
    core.clock_ns += ns;
}

// Sends an execution to the helper.
//
// `messages`: one per rank, in the order of the ranks.
static NRT_STATUS ask(runtime &                                         rt,
                      nrt_model &                                       model,
                      const std::vector<const std::vector<uint8_t> *> & messages,
                      const char *                                      where) {
    namespace protocol   = simulator::protocol;
    const double timeout = rt.config.exec_timeout;
    return with_helper(rt, model, timeout, where, [&](simulator::helper & helper, NRT_STATUS & status) {
        std::vector<uint8_t> message(sizeof(protocol::execute));
        for (const auto * one : messages) {
            message.insert(message.end(), one->begin() + sizeof(protocol::execute), one->end());
        }
        const size_t      n       = (message.size() - sizeof(protocol::execute)) / sizeof(protocol::binding);
        protocol::execute request = { protocol::EXECUTE, static_cast<uint32_t>(n), 0 };
        {
            const std::lock_guard<std::mutex> lock(model.mutex);
            if (model.helper_number != helper.number()) {
                return outcome::not_sent;  // another thread noticed the end of the helper and restarted it
            }
            request.model = model.number;
        }
        memcpy(message.data(), &request, sizeof(request));
        if (rt.faults.strikes("kill")) {
            helper.doom();
        }
        const outcome result = helper.call(message, timeout);
        if (result == outcome::answered) {
            status = answered(message, where);
        }
        return result;
    });
}

// Executes a model together with the other ranks, after all of them have begun their execution.
static NRT_STATUS ask_with_others(runtime & rt, const execution & own) {
    nrt_model & model = *own.model;
    return model.group->meet(
        model.rank, &own, rt.config.rank_timeout(),
        [&](const std::vector<const void *> & ranks) {
            std::vector<const std::vector<uint8_t> *> messages;
            uint64_t                                  clock = 0;
            for (const void * one : ranks) {
                const auto & execution = *static_cast<const simulator::execution *>(one);
                messages.push_back(&execution.message);
                clock = std::max(clock, rt.core_states[execution.model->core].clock_ns.load());
            }
            // All ranks continue at the time of the last one.
            for (const void * one : ranks) {
                rt.core_states[static_cast<const simulator::execution *>(one)->model->core].clock_ns = clock;
            }
            return ask(rt, model, messages, own.where);
        },
        own.where);
}

// Returns the status of an execution before it meets the other ranks: an error if collectives of its core failed
// before, or if a fault strikes.
static NRT_STATUS fault_of_rank(runtime & rt, nrt_model & model, const spoiler & outputs, const char * where) {
    simulator::core_state & core = rt.core_states[model.core];
    if (core.wedged) {
        log(level::error, where, "collectives of core %u failed before, and do not work any more in this process",
            model.core);
        model.group->leave(model.rank);
        return NRT_EXEC_HW_ERR_COLLECTIVES;
    }
    if (rt.faults.strikes("rank")) {
        core.lost = core.wedged = true;
        outputs.write_half();
        model.group->leave(model.rank);
        return core_status(rt, model.core, where);
    }
    if (rt.faults.strikes("straggler")) {
        model.group->pause(rt.config.rank_timeout() / 2);
    }
    if (rt.faults.strikes("absent")) {
        model.group->pause(rt.config.rank_timeout() * 2);
    }
    return NRT_SUCCESS;
}

static NRT_STATUS run(runtime & rt, const execution & execution) {
    const char * const where    = execution.where;
    nrt_model &        model    = *execution.model;
    const auto &       tensors  = execution.tensors;
    const bool         together = meets_others(model);

    const spoiler outputs_of(rt, model, tensors);
    if (!rt.faults.empty()) {
        bool             made   = false;
        const NRT_STATUS status = fault_of_execution(rt, model.core, outputs_of, where, made);
        if (made) {
            if (together) {
                model.group->leave(model.rank);
            }
            return status;
        }
    }
    if (together) {
        const NRT_STATUS status = fault_of_rank(rt, model, outputs_of, where);
        if (status != NRT_SUCCESS) {
            return status;
        }
    }
    const NRT_STATUS done = together ? ask_with_others(rt, execution) : ask(rt, model, { &execution.message }, where);
    if (done != NRT_SUCCESS) {
        if (together && model.group->failed()) {
            rt.core_states[model.core].wedged = true;
            outputs_of.write_half();
        }
        return done;
    }
    for (size_t i = 0; i < tensors.size(); i++) {
        if (model.tensors[i].is_intermediate) {
            memset(tensors[i]->data(), 0x5A, tensors[i]->size);
        }
    }
    outputs_of.spoil();
    take_price(rt, execution);
    return rt.config.strict && rt.config.reports_nan ? look_for_nan(rt, model, tensors) : done;
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

// Returns how many places of its queue a program takes. A device's queue that holds 63 small programs was full with 16
// decode steps of a whole model, and with some 30 layers of a prompt. AWS does not document how a device counts the
// size; the simulator counts tensors.
static size_t places_of(const nrt_model & model) {
    const size_t n = model.tensors.size();
    return n > 64 ? 4 : n > 16 ? 2 : 1;
}

std::shared_ptr<simulator::request> request_for(runtime &                rt,
                                                execution                launch,
                                                const nrt_tensor_set_t * inputs,
                                                const nrt_tensor_set_t * outputs,
                                                const nrt_model_t *      handle) {
    auto made     = std::make_shared<simulator::request>();
    made->spans   = spans_of(launch);
    made->places  = places_of(*launch.model);
    made->handles = { handle, inputs, outputs };
    made->not_before =
        simulator::request::clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(rt.config.launch_us * 1000));
    for (const auto & tensor : launch.tensors) {
        made->handles.push_back(tensor.get());
    }
    launch.queued         = true;
    // The fault "drops" loses a request that has this many requests before it.
    constexpr size_t MANY = 6;
    const bool       lost =
        rt.units->find(launch.model->core, NRTA_XU_COMPUTE, 0)->size() >= MANY && rt.faults.strikes("drops");
    made->run = [&rt, lost, launch = std::move(launch)] {
        if (rt.config.priced) {  // one after the other
            wait_for_launch(launch_us(rt, *launch.model, true));
        }
        if (lost) {
            take_price(rt, launch);
            return NRT_SUCCESS;
        }
        return run(rt, launch);
    };
    return made;
}

// Executes a request as nrt_execute does with NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS before release 2.32. The
// runtime passes the final status to a function that the client registers; the simulator does not have that function
// and logs the status.
static NRT_STATUS return_early(runtime &                rt,
                               execution                launch,
                               const nrt_tensor_set_t * inputs,
                               const nrt_tensor_set_t * outputs,
                               const nrt_model_t *      handle) {
    simulator::unit * const unit = rt.units->find(launch.model->core, NRTA_XU_COMPUTE, 0);
    nrta_seq_t              seq;
    return unit->submit(request_for(rt, std::move(launch), inputs, outputs, handle), seq, rt.config.in_flight);
}

}  // namespace simulator

using namespace simulator;

NRT_STATUS nrt_execute(nrt_model_t * handle, const nrt_tensor_set_t * inputs, nrt_tensor_set_t * outputs) {
    return with_runtime("nrt_execute", [&](runtime & rt) {
        execution  launch;
        NRT_STATUS status = prepare_handles(rt, handle, inputs, outputs, "nrt_execute", launch);
        if (status == NRT_SUCCESS) {
            // A queue keeps the order of its requests.
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
        wait_for_launch(rt.config.priced ? launch_us(rt, *launch.model, false) : rt.config.launch_us);
        return run(rt, launch);
    });
}
