// Models in the helper: loading them, and requests about them.

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

// Returns the helper, and starts it if necessary; null, after a log message, if it does not start.
std::shared_ptr<simulator::helper> get_helper(runtime & rt, const char * where);

// Loads the model in the helper, and stores the helper's answer in it. The caller holds the model's mutex.
outcome load(nrt_model & model, simulator::helper & helper, NRT_STATUS & status);

NRT_STATUS answered(const std::vector<uint8_t> & message, const char * where);

// Returns the status for a request without an answer.
NRT_STATUS unanswered(outcome result, simulator::helper & helper, double timeout, const char * where);

// Calls `request(helper, status)` with a helper that has loaded the model. Starts a new helper if the helper ended
// before the request; fails if it ends during the request.
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
