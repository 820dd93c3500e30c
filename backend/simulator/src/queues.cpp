// Requests in flight: the nrta_* functions of the simulated release.

#include "../../nrt/nrt_api.h"
#include "config.h"
#include "execution.h"
#include "faults.h"
#include "fds.h"
#include "log.h"
#include "runtime.h"
#include "tensors.h"
#include "units.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

namespace simulator {

// Runs `body` on the open runtime, if the simulated release has the function.
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

// Queues a request, whose status goes to `ret`.
static NRT_STATUS submit(runtime &                           rt,
                         simulator::unit *                   unit,
                         std::shared_ptr<simulator::request> request,
                         const char *                        where,
                         NRT_STATUS *                        ret,
                         nrta_seq_t *                        seq) {
    if (unit == nullptr || ret == nullptr || seq == nullptr) {
        return invalid(where, unit == nullptr ? "no such queue" : "null pointer");
    }
    request->ret = ret;
    if (rt.faults.strikes("full")) {
        return NRT_QUEUE_FULL;
    }
    NRT_STATUS status = check_in_flight(rt, request->spans, unit, where);
    if (status == NRT_SUCCESS) {
        status = unit->submit(std::move(request), *seq);
    }
    if (status == NRT_SUCCESS && rt.faults.strikes("unknown")) {
        unit->forget(NRTA_SEQ_GET_SEQ_NUM(*seq));
    }
    return status;
}

// Returns the core that queues a tensor's requests: the tensor's own core, or the first one for host tensors.
static uint32_t core_of(const runtime & rt, const nrt_tensor & tensor) {
    return tensor.arena() == rt.host()->index() ? 0 : tensor.arena();
}

static NRT_STATUS schedule_transfer(const char *         where,
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
        if (from != nullptr) {
            count_transfer(rt, *tensor, true);
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
        return submit(rt, rt.units->find(core_of(rt, *tensor), NRTA_XU_TENSOR_OP, queue), std::move(made), where, ret,
                      seq);
    });
}

}  // namespace simulator

using namespace simulator;

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
        return submit(rt, unit, std::move(made), where, ret, seq);
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
        count_transfer(rt, *copy.destination, true);
        auto made     = std::make_shared<simulator::request>();
        made->spans   = copy.spans();
        made->handles = { source, destination };
        made->run     = [&rt, copy] {
            return copy.run(rt);
        };
        simulator::unit * const unit = rt.units->find(core_of(rt, *copy.destination), NRTA_XU_TENSOR_OP, queue);
        return submit(rt, unit, std::move(made), where, ret, seq);
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
        // AWS documents no such status for a request that is not done. With this fault, the runtime returns it anyway.
        if (!*completed && rt.faults.strikes("busy")) {
            return NRT_EXEC_NC_BUSY;
        }
        if (*completed && unit->last() != seq && rt.faults.strikes("order")) {
            *completed = false;
        }
        return NRT_SUCCESS;
    });
}

NRT_STATUS nrta_get_sequence(uint32_t vnc, nrta_xu_t kind, int queue, nrta_seq_t * seq) {
    const char * const where = "nrta_get_sequence";
    return with_queues(where, &simulator::config::has_queues, [&](runtime & rt) {
        const simulator::unit * const unit = rt.units->find(vnc, kind, queue);
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
        simulator::unit * const unit = rt.units->find(seq);
        if (event < 0) {
            return unit != nullptr && unit->unregister(NRTA_SEQ_GET_SEQ_NUM(seq))
                       ? NRT_SUCCESS
                       : invalid(where, "no request has this sequence ID");
        }
        // Duplicates the descriptor, since the caller may close its own first.
        simulator::unique_fd own(fcntl(event, F_DUPFD_CLOEXEC, 0));
        if (!own) {
            return invalid(where, "not a file descriptor");
        }
        return unit != nullptr && unit->notify(NRTA_SEQ_GET_SEQ_NUM(seq), std::move(own))
                   ? NRT_SUCCESS
                   : invalid(where, "no request has this sequence ID");
    });
}
