// Executions, and the requests that queues hold for them.

#pragma once

#include "../../nrt/nrt_api.h"
#include "runtime.h"
#include "units.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace simulator {

// A model and the memory that one execution of it uses.
struct execution {
    const char *                             where;
    std::shared_ptr<nrt_model>               model;
    std::vector<std::shared_ptr<nrt_tensor>> tensors;  // inputs, then outputs
    std::vector<uint8_t>                     message;  // for the helper
    bool                                     queued = false;
};

NRT_STATUS prepare_handles(runtime &                rt,
                           nrt_model_t *            model_handle,
                           const nrt_tensor_set_t * inputs,
                           const nrt_tensor_set_t * outputs,
                           const char *             where,
                           execution &              out);

// Returns a request for an execution. The time of its launch begins with this call.
std::shared_ptr<simulator::request> request_for(runtime &                rt,
                                                execution                launch,
                                                const nrt_tensor_set_t * inputs,
                                                const nrt_tensor_set_t * outputs,
                                                const nrt_model_t *      handle);

}  // namespace simulator
