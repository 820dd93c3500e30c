// Models in the helper: how they come there, and how a request about one is answered.

#pragma once

#include "../../nrt/nrt_api.h"
#include "helper.h"
#include "log.h"
#include "runtime.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace simulator {

// Returns the helper, started if need be; null when it does not start, which was logged.
std::shared_ptr<simulator::helper> get_helper(runtime & rt, const char * where);

// Makes the model known to the helper, and fills in what the helper says of it. The model's mutex is held.
outcome load(nrt_model & model, simulator::helper & helper, NRT_STATUS & status);

NRT_STATUS answered(const std::vector<uint8_t> & message, const char * where);

// What a request that was not answered comes to.
NRT_STATUS unanswered(outcome result, simulator::helper & helper, double timeout, const char * where);

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

}  // namespace simulator
